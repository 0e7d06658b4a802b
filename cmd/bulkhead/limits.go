package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	limitsv1 "bulkhead.dev/services/gen/bulkhead/limits/v1"
	"bulkhead.dev/services/gen/bulkhead/limits/v1/limitsv1connect"
)

type limitCmd struct {
	List      limitListCmd      `cmd:"" help:"List the limits of a tenant, and what is taken of them."`
	Set       limitSetCmd       `cmd:"" help:"Set a limit; one for the same thing is changed."`
	Delete    limitDeleteCmd    `cmd:"" help:"Delete a limit."`
	Effective limitEffectiveCmd `cmd:"" help:"Say which limits bind a request, and which binds first."`
}

type priceCmd struct {
	List priceListCmd `cmd:"" help:"List prices."`
	Set  priceSetCmd  `cmd:"" help:"Add a price, from now or a later moment on."`
}

func limitClient(r *remote, e *env) (limitsv1connect.LimitServiceClient, error) {
	key, err := r.key(e, true)
	if err != nil {
		return nil, err
	}
	return limitsv1connect.NewLimitServiceClient(http.DefaultClient, r.URL, bearer(key)), nil
}

type limitListCmd struct {
	remote
	Tenant string `help:"Tenant (ten_…); the operator only. Default: that of the calling key."`
}

// Run prints a table.
func (c *limitListCmd) Run(ctx context.Context, e *env) error {
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.ListLimits(ctx, &limitsv1.ListLimitsRequest{TenantId: c.Tenant})
	if err != nil {
		return say(c.URL, err)
	}
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tFOR\tMETER\tPER\tLIMIT\tSPENT\tHELD\tREMAINING\tENDS\tSET BY")
	for _, u := range res.GetLimits() {
		l := u.GetLimit()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", l.GetId(), limitFor(l), limitMeter(l), l.GetPeriod(),
			amount(l, l.GetAmount()), amount(l, u.GetSpent()), amount(l, u.GetHeld()), amount(l, u.GetRemaining()), ends(u.GetEnds()), setBy(l))
	}
	return w.Flush()
}

func limitFor(l *limitsv1.Limit) string {
	who := "tenant"
	switch {
	case l.GetProjectId() != "":
		who = l.GetProjectId()
	case l.GetKeyId() != "":
		who = l.GetKeyId()
	}
	if l.GetModel() != "" {
		who += " " + l.GetModel()
	}
	return who
}

func limitMeter(l *limitsv1.Limit) string {
	if l.GetInputWeight() == 1 && l.GetOutputWeight() == 1 {
		return l.GetMeter()
	}
	return fmt.Sprintf("%s (%d:%d)", l.GetMeter(), l.GetInputWeight(), l.GetOutputWeight())
}

func setBy(l *limitsv1.Limit) string {
	if l.GetPlatform() {
		return "operator"
	}
	return "tenant"
}

func ends(t *timestamppb.Timestamp) string {
	if t == nil {
		return "-"
	}
	return t.AsTime().Format(time.DateTime)
}

// amount prints money with its six decimals at most.
func amount(l *limitsv1.Limit, v int64) string {
	if l.GetMeter() != "money" {
		return strconv.FormatInt(v, 10)
	}
	return money(v)
}

const millionths = 1_000_000

func money(v int64) string {
	sign := ""
	if v < 0 {
		sign, v = "-", -v
	}
	cents := strings.TrimRight(fmt.Sprintf("%06d", v%millionths), "0")
	for len(cents) < 2 {
		cents += "0"
	}
	return fmt.Sprintf("%s%d.%s", sign, v/millionths, cents)
}

var errMoney = errors.New("an amount of money is a number with at most six decimals, such as 100 or 0.15")

// parseMoney reads a decimal number into millionths.
func parseMoney(s string) (int64, error) {
	whole, part, _ := strings.Cut(s, ".")
	if len(part) > 6 || strings.Trim(whole+part, "0123456789") != "" || whole == "" {
		return 0, errMoney
	}
	v, err := strconv.ParseInt(whole+(part + "000000")[:6], 10, 64)
	if err != nil {
		return 0, errMoney
	}
	return v, nil
}

type limitSetCmd struct {
	remote
	Meter        string `arg:"" enum:"requests,concurrent,tokens,money" help:"requests, concurrent, tokens or money."`
	Amount       string `arg:"" help:"The limit; money with decimals."`
	Per          string `enum:"none,minute,day,month" default:"none" help:"minute, day or month; nothing for concurrent requests."`
	Tenant       string `help:"Tenant (ten_…); the operator only. Default: that of the calling key."`
	Project      string `help:"Only for this project (prj_…)."`
	Key          string `help:"Only for this key (key_…)."`
	Model        string `help:"Only for this model."`
	Soft         string `help:"Warn the operator from here on."`
	InputWeight  int32  `help:"What a token of the prompt counts."`
	OutputWeight int32  `help:"What a token of the answer counts."`
}

// Run prints the limit's id.
func (c *limitSetCmd) Run(ctx context.Context, e *env) error {
	parse := func(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) }
	if c.Meter == "money" {
		parse = parseMoney
	}
	l := &limitsv1.Limit{TenantId: c.Tenant, ProjectId: c.Project, KeyId: c.Key, Model: c.Model, Meter: c.Meter, Period: c.Per,
		InputWeight: c.InputWeight, OutputWeight: c.OutputWeight}
	var err error
	if l.Amount, err = parse(c.Amount); err != nil {
		return fmt.Errorf("%q is no limit: %w", c.Amount, err)
	}
	if c.Soft != "" {
		if l.Soft, err = parse(c.Soft); err != nil {
			return fmt.Errorf("%q is no limit: %w", c.Soft, err)
		}
	}
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.SetLimit(ctx, &limitsv1.SetLimitRequest{Limit: l})
	if err != nil {
		return say(c.URL, err)
	}
	set := res.GetLimit()
	fmt.Fprintf(e.stdout, "%s: %s of %s per %s for %s, set by the %s.\n", set.GetId(), amount(set, set.GetAmount()), limitMeter(set), set.GetPeriod(), limitFor(set), setBy(set))
	return nil
}

type limitDeleteCmd struct {
	remote
	ID string `arg:"" help:"The limit's id (lim_…)."`
}

// Run deletes one limit.
func (c *limitDeleteCmd) Run(ctx context.Context, e *env) error {
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	if _, err := client.DeleteLimit(ctx, &limitsv1.DeleteLimitRequest{Id: c.ID}); err != nil {
		return say(c.URL, err)
	}
	fmt.Fprintf(e.stdout, "Deleted %s.\n", c.ID)
	return nil
}

type limitEffectiveCmd struct {
	remote
	Tenant  string `help:"Tenant (ten_…); the operator only. Default: that of the calling key."`
	Project string `help:"Project (prj_…); default: that of the calling key."`
	Key     string `help:"Key (key_…); default: the calling one."`
	Model   string `env:"BULKHEAD_MODEL" default:"smollm2-135m" help:"Model of the request."`
	Input   uint32 `default:"1000" help:"Tokens of the prompt."`
	Output  uint32 `default:"1000" help:"Tokens of the longest answer."`
}

// Run prints a table and why the first of them binds.
func (c *limitEffectiveCmd) Run(ctx context.Context, e *env) error {
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.GetEffectiveLimits(ctx, &limitsv1.GetEffectiveLimitsRequest{TenantId: c.Tenant, ProjectId: c.Project, KeyId: c.Key, Model: c.Model, InputTokens: c.Input, OutputTokens: c.Output})
	if err != nil {
		return say(c.URL, err)
	}
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FOR\tMETER\tPER\tLIMIT\tREMAINING\tFITS\tBINDS")
	why := "No limit binds such a request."
	for _, l := range res.GetLimits() {
		binds := ""
		if l.GetBinds() {
			binds, why = "first", l.GetWhy()
		}
		u := l.GetUsage()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", limitFor(u.GetLimit()), limitMeter(u.GetLimit()), u.GetLimit().GetPeriod(),
			amount(u.GetLimit(), u.GetLimit().GetAmount()), amount(u.GetLimit(), u.GetRemaining()), l.GetFits(), binds)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(e.stdout, why)
	return nil
}

type priceListCmd struct {
	remote
	Model string `arg:"" optional:"" help:"Only of this model."`
}

// Run prints a table.
func (c *priceListCmd) Run(ctx context.Context, e *env) error {
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.ListPrices(ctx, &limitsv1.ListPricesRequest{Model: c.Model})
	if err != nil {
		return say(c.URL, err)
	}
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MODEL\tMETER\tPER MILLION\tFROM")
	for _, p := range res.GetPrices() {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", p.GetModel(), p.GetMeter(), money(p.GetMicrosPerMillion()), p.GetFrom().AsTime().Format(time.DateTime))
	}
	return w.Flush()
}

type priceSetCmd struct {
	remote
	Model string    `arg:"" help:"Model."`
	Meter string    `arg:"" enum:"input,cached_input,output" help:"input, cached_input or output."`
	Price string    `arg:"" help:"For a million tokens, such as 0.15."`
	From  time.Time `help:"From when on (RFC 3339); default: now." format:"2006-01-02T15:04:05Z07:00"`
}

// Run prints the price.
func (c *priceSetCmd) Run(ctx context.Context, e *env) error {
	p := &limitsv1.Price{Model: c.Model, Meter: c.Meter}
	var err error
	if p.MicrosPerMillion, err = parseMoney(c.Price); err != nil {
		return err
	}
	if !c.From.IsZero() {
		p.From = timestamppb.New(c.From)
	}
	client, err := limitClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.SetPrice(ctx, &limitsv1.SetPriceRequest{Price: p})
	if err != nil {
		return say(c.URL, err)
	}
	fmt.Fprintf(e.stdout, "%s of %s costs %s for a million tokens from %s on.\n", c.Meter, c.Model, money(res.GetPrice().GetMicrosPerMillion()), res.GetPrice().GetFrom().AsTime().Format(time.DateTime))
	return nil
}
