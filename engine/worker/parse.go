package worker

import (
	"math"
	"unicode/utf8"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

const (
	// maxStops and maxStopBytes bound the stop strings of a request: four times
	// what the public API takes, and longer than any sensible one. Each step
	// searches for all of them.
	maxStops     = 16
	maxStopBytes = 1024
)

// names are the ids that both legs are told.
type names struct {
	request  id.Request
	owner    id.Owner
	lease    id.Lease
	transfer id.Transfer
	nonce    id.Nonce
	// end is told when the call is over and has let go of everything.
	end func(*workerv1.LegFacts)
}

func (n names) ended(f *workerv1.LegFacts) {
	if n.end != nil {
		n.end(f)
	}
}

type named interface {
	GetRequestId() []byte
	GetOwner() []byte
	GetLeaseId() []byte
	GetTransferId() []byte
	GetNonce() []byte
}

func parseNames(m named) (n names, err error) {
	parse(&err, &n.request, m.GetRequestId(), "request_id")
	parse(&err, &n.owner, m.GetOwner(), "owner")
	parse(&err, &n.lease, m.GetLeaseId(), "lease_id")
	parse(&err, &n.transfer, m.GetTransferId(), "transfer_id")
	parse(&err, &n.nonce, m.GetNonce(), "nonce")
	return n, err
}

// parse reads an id that must be set. It keeps the first error.
func parse[T ~[16]byte](err *error, to *T, b []byte, field string) {
	v, e := id.FromBytes[T](b)
	var zero T
	if *err == nil && (e != nil || v == zero) {
		*err = refuse(BadRequest, "%s is not an id of 16 bytes", field)
	}
	*to = v
}

// parsePeer reads where the other leg is.
func parsePeer(m *workerv1.Peer, address string) (where, error) {
	var err error
	w := where{address: address}
	parse(&err, &w.epoch, m.GetEpoch(), "epoch of the other leg")
	if err != nil {
		return where{}, err
	}
	if _, _, err := peer.SplitAddress(address); err != nil {
		return where{}, refuse(BadRequest, "address of the other leg: %w", err)
	}
	return w, nil
}

// parseVersion reads the version of the hand-off, which a gateway that knows of
// one only does not name.
func (w *worker) parseVersion(v uint32) (uint16, error) {
	if v == 0 {
		return handoff.Whole, nil
	}
	for _, ours := range w.set.handoff {
		if uint32(ours) == v {
			return ours, nil
		}
	}
	return 0, refuse(Reason(handoff.WrongVersion), "this worker does not speak version %d of the hand-off", v)
}

// checkModel refuses work for other weights.
func (w *worker) checkModel(digest []byte) error {
	if string(digest) != string(w.set.digest[:]) {
		return refuse(WrongModel, "this worker serves %v", w.set.digest)
	}
	return nil
}

// checkLength refuses what does not fit the window. Counts are 32 bits, so the
// sum does not overflow.
func (w *worker) checkLength(prompt, output uint32) error {
	if prompt < 1 {
		return refuse(BadRequest, "no prompt")
	}
	if int64(prompt)+int64(output) > int64(w.window) {
		return refuse(ContextLength, "%d prompt and %d output tokens exceed the window of %d", prompt, output, w.window)
	}
	return nil
}

// parseTokens reads token ids.
func (w *worker) parseTokens(ids []uint32) ([]int32, error) {
	if int64(len(ids)) > int64(w.window) {
		return nil, refuse(ContextLength, "%d prompt tokens exceed the window of %d", len(ids), w.window)
	}
	if err := w.checkLength(uint32(len(ids)), 0); err != nil {
		return nil, err
	}
	out := make([]int32, len(ids))
	for i, t := range ids {
		if int64(t) >= int64(w.forward.Vocab()) {
			return nil, refuse(BadRequest, "a token id is outside the vocabulary")
		}
		out[i] = int32(t)
	}
	return out, nil
}

// generateParams are the checked parameters of a Generate call.
type generateParams struct {
	names
	prompt    int
	digest    [32]byte
	last      int32
	maxOutput int
	params    sample.Params
	stops     []string
	prefill   where
	version   uint16 // of the hand-off
}

func (w *worker) parseGenerate(m *workerv1.GenerateRequest) (p generateParams, err error) {
	if p.names, err = parseNames(m); err != nil {
		return p, err
	}
	if err := w.checkModel(m.GetModelDigest()); err != nil {
		return p, err
	}
	if m.GetMaxOutputTokens() < 1 {
		return p, refuse(BadRequest, "max_output_tokens is 0")
	}
	if err := w.checkLength(m.GetPromptTokens(), m.GetMaxOutputTokens()); err != nil {
		return p, err
	}
	p.prompt, p.maxOutput = int(m.GetPromptTokens()), int(m.GetMaxOutputTokens())
	if copy(p.digest[:], m.GetTokenDigest()) != len(m.GetTokenDigest()) || len(m.GetTokenDigest()) != len(p.digest) {
		return p, refuse(BadRequest, "token_digest has not 32 bytes")
	}
	if int64(m.GetLastToken()) >= int64(w.forward.Vocab()) {
		return p, refuse(BadRequest, "last_token is outside the vocabulary")
	}
	p.last = int32(m.GetLastToken())
	if p.params, err = parseSampling(m.GetSampling()); err != nil {
		return p, err
	}
	if len(m.GetStop()) > maxStops {
		return p, refuse(BadRequest, "%d stop strings, at most %d", len(m.GetStop()), maxStops)
	}
	for _, s := range m.GetStop() {
		if s == "" || len(s) > maxStopBytes || !utf8.ValidString(s) {
			return p, refuse(BadRequest, "a stop string is empty, longer than %d bytes, or not UTF-8", maxStopBytes)
		}
	}
	p.stops = m.GetStop()
	if p.version, err = w.parseVersion(m.GetHandoffVersion()); err != nil {
		return p, err
	}
	p.prefill, err = parsePeer(m.GetPrefill(), m.GetPrefill().GetFabricAddress())
	return p, err
}

func parseSampling(m *workerv1.Sampling) (sample.Params, error) {
	if m == nil {
		return sample.Params{}, refuse(BadRequest, "no sampling parameters")
	}
	if m.GetTopK() > math.MaxInt32 {
		return sample.Params{}, refuse(BadRequest, "top_k is too large")
	}
	p := sample.Params{
		Temperature: m.GetTemperature(), TopP: m.GetTopP(), MinP: m.GetMinP(), TopK: int(m.GetTopK()),
		FrequencyPenalty: m.GetFrequencyPenalty(), PresencePenalty: m.GetPresencePenalty(), Seed: m.GetSeed(),
	}
	if err := p.Validate(); err != nil {
		return sample.Params{}, &refusal{BadRequest, err}
	}
	return p, nil
}
