package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"

	auditv1 "bulkhead.dev/services/gen/bulkhead/audit/v1"
	"bulkhead.dev/services/gen/bulkhead/audit/v1/auditv1connect"
	inferencev1 "bulkhead.dev/services/gen/bulkhead/inference/v1"
	"bulkhead.dev/services/gen/bulkhead/inference/v1/inferencev1connect"
	tenancyv1 "bulkhead.dev/services/gen/bulkhead/tenancy/v1"
	"bulkhead.dev/services/gen/bulkhead/tenancy/v1/tenancyv1connect"
)

// remote is how a command reaches a running platform.
type remote struct {
	URL string `default:"http://127.0.0.1:8080" env:"BULKHEAD_URL" help:"Address of the platform."`
	// The key has no flag: arguments are visible to every user of a machine.
	Data string `env:"BULKHEAD_DATA" type:"path" help:"Data folder; its operator key is used where BULKHEAD_API_KEY is not set."`
}

// key returns the API key to use. Commands that act for the operator pass
// operator, and then the key file in the data folder is enough.
func (r *remote) key(e *env, operator bool) (string, error) {
	if k := e.getenv("BULKHEAD_API_KEY"); k != "" {
		return k, nil
	}
	if operator {
		dir, err := dataDir(r.Data, e.getenv)
		if err == nil {
			if b, err := os.ReadFile(filepath.Join(dir, operatorKeyFile)); err == nil {
				return strings.TrimSpace(string(b)), nil
			}
		}
		return "", errors.New("set BULKHEAD_API_KEY to an API key, or --data to the folder of the platform")
	}
	return "", errors.New("set BULKHEAD_API_KEY to the API key that `bulkhead up` printed on its first start (bulkhead key create makes another)")
}

// bearer adds the key to every call.
func bearer(key string) connect.ClientOption {
	return connect.WithInterceptors(&bearerInterceptor{value: "Bearer " + key})
}

type bearerInterceptor struct{ value string }

func (b *bearerInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", b.value)
		return next(ctx, req)
	}
}

func (b *bearerInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		c.RequestHeader().Set("Authorization", b.value)
		return c
	}
}

func (b *bearerInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// say turns the error of a call into a line for a person.
func say(url string, err error) error {
	if ce, ok := errors.AsType[*connect.Error](err); ok {
		if ce.Code() == connect.CodeUnavailable && !connect.IsWireError(err) {
			return fmt.Errorf("nothing answers at %s; is `bulkhead up` running there? (%s)", url, ce.Message())
		}
		return errors.New(ce.Message())
	}
	return err
}

type chatCmd struct {
	remote
	Prompt      []string `arg:"" help:"What to ask."`
	Model       string   `env:"BULKHEAD_MODEL" default:"smollm2-135m" help:"Model to ask."`
	System      string   `help:"System message."`
	MaxTokens   uint32   `help:"Longest answer, in tokens."`
	Temperature float32  `default:"-1" help:"0 is greedy; default 1."`
	Seed        *uint64  `help:"Same seed, same answer."`
}

// Run asks and prints the answer piece by piece.
func (c *chatCmd) Run(ctx context.Context, e *env) error {
	key, err := c.key(e, false)
	if err != nil {
		return err
	}
	req := &inferencev1.GenerateStreamRequest{Model: c.Model, Parameters: &inferencev1.Parameters{Seed: c.Seed}}
	if c.System != "" {
		req.Messages = append(req.Messages, &inferencev1.Message{Role: "system", Content: c.System})
	}
	req.Messages = append(req.Messages, &inferencev1.Message{Role: "user", Content: strings.Join(c.Prompt, " ")})
	if c.MaxTokens > 0 {
		req.Parameters.MaxOutputTokens = &c.MaxTokens
	}
	if c.Temperature >= 0 {
		req.Parameters.Temperature = &c.Temperature
	}
	client := inferencev1connect.NewInferenceServiceClient(http.DefaultClient, c.URL, bearer(key))
	stream, err := client.GenerateStream(ctx, req)
	if err != nil {
		return say(c.URL, err)
	}
	defer stream.Close()
	var final *inferencev1.Final
	for stream.Receive() {
		fmt.Fprint(e.stdout, stream.Msg().GetText())
		if f := stream.Msg().GetFinal(); f != nil {
			final = f
		}
	}
	fmt.Fprintln(e.stdout)
	if err := stream.Err(); err != nil {
		return say(c.URL, err)
	}
	if final == nil {
		return errors.New("the answer is incomplete: it ended without its receipt")
	}
	fmt.Fprintf(e.stderr, "%d prompt + %d output tokens, receipt %s\n", final.GetUsage().GetPromptTokens(), final.GetUsage().GetCompletionTokens(), final.GetReceiptId())
	return nil
}

type keyCmd struct {
	Create keyCreateCmd `cmd:"" help:"Create an API key and print it once."`
	List   keyListCmd   `cmd:"" help:"List API keys."`
	Revoke keyRevokeCmd `cmd:"" help:"Revoke an API key; it stops working within a second."`
}

func tenancyClient(r *remote, e *env) (tenancyv1connect.TenancyServiceClient, error) {
	key, err := r.key(e, true)
	if err != nil {
		return nil, err
	}
	return tenancyv1connect.NewTenancyServiceClient(http.DefaultClient, r.URL, bearer(key)), nil
}

type keyCreateCmd struct {
	remote
	Name    string   `arg:"" optional:"" help:"A label for people."`
	Project string   `help:"Project of the key (prj_…); default: that of the calling key."`
	Tenant  string   `help:"Tenant to make the key for (ten_…); the operator only."`
	Scope   []string `help:"What the key may do; default: inference, receipts:read."`
}

// Run prints the secret on standard output and everything else on standard
// error, so that a script can capture it.
func (c *keyCreateCmd) Run(ctx context.Context, e *env) error {
	client, err := tenancyClient(&c.remote, e)
	if err != nil {
		return err
	}
	res, err := client.CreateKey(ctx, &tenancyv1.CreateKeyRequest{Name: c.Name, ProjectId: c.Project, TenantId: c.Tenant, Scopes: c.Scope})
	if err != nil {
		return say(c.URL, err)
	}
	fmt.Fprintf(e.stderr, "Created %s with %s. It is shown once:\n", res.GetKey().GetId(), strings.Join(res.GetKey().GetScopes(), ", "))
	fmt.Fprintln(e.stdout, res.GetSecret())
	return nil
}

type keyListCmd struct{ remote }

// Run prints a table of all keys.
func (c *keyListCmd) Run(ctx context.Context, e *env) error {
	client, err := tenancyClient(&c.remote, e)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tNAME\tBEGINS\tSCOPES\tCREATED\tREVOKED")
	for token := ""; ; {
		res, err := client.ListKeys(ctx, &tenancyv1.ListKeysRequest{PageToken: token})
		if err != nil {
			return say(c.URL, err)
		}
		for _, k := range res.GetKeys() {
			revoked := "-"
			if k.GetRevoked() != nil {
				revoked = k.GetRevoked().AsTime().Format(time.DateTime)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", k.GetId(), k.GetName(), k.GetPrefix(), strings.Join(k.GetScopes(), ","), k.GetCreated().AsTime().Format(time.DateTime), revoked)
		}
		if token = res.GetNextPageToken(); token == "" {
			return w.Flush()
		}
	}
}

type keyRevokeCmd struct {
	remote
	ID string `arg:"" help:"The key's id (key_…)."`
}

// Run revokes one key.
func (c *keyRevokeCmd) Run(ctx context.Context, e *env) error {
	client, err := tenancyClient(&c.remote, e)
	if err != nil {
		return err
	}
	if _, err := client.RevokeKey(ctx, &tenancyv1.RevokeKeyRequest{KeyId: c.ID}); err != nil {
		return say(c.URL, err)
	}
	fmt.Fprintf(e.stdout, "Revoked %s.\n", c.ID)
	return nil
}

type receiptCmd struct {
	Get receiptGetCmd `cmd:"" help:"Fetch the receipt of a response."`
}

type receiptGetCmd struct {
	remote
	ID  string `arg:"" help:"Receipt id (rcp_…) or request id (req_…)."`
	Raw bool   `help:"Write the canonical bytes instead of JSON; their SHA-256 is the receipt's digest."`
}

// Run prints the receipt as JSON, or its canonical bytes.
func (c *receiptGetCmd) Run(ctx context.Context, e *env) error {
	key, err := c.key(e, false)
	if err != nil {
		return err
	}
	client := auditv1connect.NewAuditServiceClient(http.DefaultClient, c.URL, bearer(key))
	res, err := client.GetReceipt(ctx, &auditv1.GetReceiptRequest{Id: c.ID})
	if err != nil {
		return say(c.URL, err)
	}
	if c.Raw {
		_, err = e.stdout.Write(res.GetBody())
		return err
	}
	_, err = fmt.Fprintln(e.stdout, res.GetJson())
	return err
}
