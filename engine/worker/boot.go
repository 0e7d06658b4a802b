package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
)

// Boot is everything that a worker is told. It holds the private key of the
// worker, so it travels over an inherited pipe only.
type Boot struct {
	Role  peer.Role `json:"role"`
	Epoch string    `json:"epoch"` // text form of id.Epoch; the certificate names the same

	ModelPath   string `json:"model_path"`
	ModelDigest string `json:"model_digest"` // "sha256:<hex>"; the worker checks the file

	Listen       string `json:"listen"`                  // worker API: "unix:/path" or "tcp:host:port"
	FabricListen string `json:"fabric_listen,omitempty"` // page server, prefill only
	Front        string `json:"front"`                   // registration service

	Credentials peer.Credentials `json:"credentials"`

	Threads    int    `json:"threads"`     // for arithmetic; 0 is one
	Backend    string `json:"backend"`     // "c", "go", "sim" to compute nothing, or "" for the best
	Sim        Sim    `json:"sim"`         // how long the backend "sim" takes
	CPULevel   string `json:"cpu_level"`   // "" for the best
	Window     int    `json:"window"`      // tokens of prompt and answer to serve, at most the model's; 0 is the model's
	Pages      int    `json:"pages"`       // usable pages of the KV pool
	Quarantine int    `json:"quarantine"`  // pages on top that may be in quarantine; beyond, work is refused; 0 is no limit
	CachePages int    `json:"cache_pages"` // pages of prompts remembered for each owner, prefill only
	ScrubRate  int64  `json:"scrub_rate"`  // bytes a second that free pages are wiped at ahead of use; 0 wipes at use
	KVType     string `json:"kv_type"`     // "f16" or "f32"
	Scrub      string `json:"scrub"`       // "on-tenant-change" (also "") or "always"
	ScrubWith  string `json:"scrub_with"`  // "zero" (also ""), or "nan" for tests
	LockMemory bool   `json:"lock_memory"` // keep the pool out of swap
	MaxRunning int    `json:"max_running"` // requests that run at once
	Queue      int    `json:"queue"`       // requests that wait; 0 refuses
	PerTenant  int    `json:"per_tenant"`  // requests of one owner, running and waiting
	Chunk      int    `json:"chunk"`       // prompt tokens of one pass, prefill only
	Mailbox    int    `json:"mailbox"`     // ids that may wait for a slow reader; 0 is DefaultMailbox
	SlowLimit  Span   `json:"slow_limit"`  // how long they may; 0 is DefaultSlowLimit
	OfferWait  Span   `json:"offer_wait"`  // from Reserved to Committed; 0 is DefaultOfferWait
	PageStall  Span   `json:"page_stall"`  // how long a read of pages may stand still; 0 is fabric.DefaultStallTimeout
	DrainFor   Span   `json:"drain_for"`   // how long running work may go on at the end; 0 is DefaultDrainFor
	Handoff    int    `json:"handoff"`     // highest version of the hand-off to speak; 0 is the newest
	Build      string `json:"build"`       // version and commit, for the registry
	Debug      bool   `json:"debug"`       // leave the process open to debuggers and core dumps
}

// Simulated is the backend that computes nothing; see package sim.
const Simulated = "sim"

// Sim is the latency model of the simulated backend; see sim.Latency.
type Sim struct {
	PromptToken Span `json:"prompt_token"`
	Step        Span `json:"step"`
	Sequence    Span `json:"sequence"`
}

// Span is a time span that is written as "10s".
type Span time.Duration

// MarshalText writes the form of time.Duration.
func (s Span) MarshalText() ([]byte, error) { return []byte(time.Duration(s).String()), nil }

// UnmarshalText reads the form of time.ParseDuration.
func (s *Span) UnmarshalText(b []byte) error {
	d, err := time.ParseDuration(string(b))
	if err != nil {
		return errors.New("not a time span")
	}
	*s = Span(d)
	return nil
}

// What holds where Boot says nothing.
const (
	// DefaultMailbox is some seconds of text for any reader.
	DefaultMailbox = 256
	// DefaultSlowLimit is how long a reader may take nothing although its
	// mailbox is full. Its pages are of no use to others meanwhile.
	DefaultSlowLimit = Span(30 * time.Second)
	// DefaultOfferWait allows for a long prompt on a busy prefill worker.
	DefaultOfferWait = Span(2 * time.Minute)
	// DefaultDrainFor is below the grace period that orchestrators give.
	DefaultDrainFor = Span(20 * time.Second)
)

// ParseBoot reads a boot document. Unknown fields are errors.
func ParseBoot(b []byte) (Boot, error) {
	var boot Boot
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&boot); err != nil {
		// The text of a decoding error may quote the document.
		return Boot{}, errors.New("boot document is malformed")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Boot{}, errors.New("boot document is followed by something")
	}
	return boot, nil
}

// window is what is served of the window of a model.
func (b Boot) window(model int) int {
	if b.Window == 0 {
		return model
	}
	return min(b.Window, model)
}

// settings is a boot document that was checked.
type settings struct {
	Boot
	epoch   id.Epoch
	digest  model.Digest
	dtype   kv.DType
	handoff []uint16 // versions that the worker speaks
	scrub   kv.ScrubPolicy
	fill    kv.Pattern
}

// ErrBoot means that a boot document cannot be served.
var ErrBoot = errors.New("bad boot document")

// check parses the texts and checks the ranges.
func (b Boot) check() (settings, error) {
	s := settings{Boot: b}
	bad := func(format string, args ...any) (settings, error) {
		return settings{}, fmt.Errorf("%w: %s", ErrBoot, fmt.Sprintf(format, args...))
	}
	var err error
	if s.epoch, err = id.ParseEpoch(b.Epoch); err != nil {
		return bad("epoch: %v", err)
	}
	who, err := b.Credentials.Identity()
	if err != nil {
		return bad("credentials: %v", err)
	}
	if b.Role != peer.Prefill && b.Role != peer.Decode || who != peer.Worker(b.Role, s.epoch) {
		return bad("the certificate names %v, not the %s worker %v", who, b.Role, s.epoch)
	}
	if s.digest, err = model.ParseDigest(b.ModelDigest); err != nil {
		return bad("model digest: %v", err)
	}
	for _, f := range []struct {
		name string
		v    int
		lo   int
	}{{"pages", b.Pages, 1}, {"max_running", b.MaxRunning, 1}, {"queue", b.Queue, 0}, {"per_tenant", b.PerTenant, 1}, {"threads", b.Threads, 0}, {"mailbox", b.Mailbox, 0}, {"quarantine", b.Quarantine, 0}, {"cache_pages", b.CachePages, 0}, {"window", b.Window, 0}} {
		if f.v < f.lo {
			return bad("%s is %d, want at least %d", f.name, f.v, f.lo)
		}
	}
	if b.Role == peer.Prefill && b.Chunk < 1 {
		return bad("chunk is %d, want at least 1", b.Chunk)
	}
	if (b.Role == peer.Prefill) != (b.FabricListen != "") {
		return bad("a page server belongs to the prefill role, and only to it")
	}
	if b.ScrubRate < 0 {
		return bad("scrub_rate is %d, want at least 0", b.ScrubRate)
	}
	if b.CachePages > 0 && b.Role != peer.Prefill {
		return bad("only the prefill role remembers prompts")
	}
	if s.Sim.PromptToken < 0 || s.Sim.Step < 0 || s.Sim.Sequence < 0 || s.SlowLimit < 0 || s.OfferWait < 0 || s.PageStall < 0 || s.DrainFor < 0 {
		return bad("a time span is negative")
	}
	if b.Handoff < 0 || b.Handoff > math.MaxUint16 {
		return bad("handoff version %d", b.Handoff)
	}
	s.handoff = handoff.Versions(uint16(b.Handoff))
	var ok bool
	if s.dtype, ok = map[string]kv.DType{"f16": kv.F16, "f32": kv.F32}[b.KVType]; !ok {
		return bad("kv_type is neither f16 nor f32")
	}
	if s.scrub, ok = map[string]kv.ScrubPolicy{"": kv.OnTenantChange, "on-tenant-change": kv.OnTenantChange, "always": kv.Always}[b.Scrub]; !ok {
		return bad("scrub is neither on-tenant-change nor always")
	}
	if s.fill, ok = map[string]kv.Pattern{"": kv.Zero, "zero": kv.Zero, "nan": kv.NaN}[b.ScrubWith]; !ok {
		return bad("scrub_with is neither zero nor nan")
	}
	s.Threads = max(s.Threads, 1)
	s.Mailbox = orDefault(s.Mailbox, DefaultMailbox)
	s.SlowLimit = orDefault(s.SlowLimit, DefaultSlowLimit)
	s.OfferWait = orDefault(s.OfferWait, DefaultOfferWait)
	s.DrainFor = orDefault(s.DrainFor, DefaultDrainFor)
	return s, nil
}

func orDefault[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}
