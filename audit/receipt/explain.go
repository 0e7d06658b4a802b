package receipt

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"bulkhead.dev/infra/id"
)

// JSON renders a receipt for people. The order of the fields and every format
// are fixed, so the same receipt always gives the same text; what is hashed
// is the CBOR, not this.
func (r Receipt) JSON() ([]byte, error) {
	v := view{
		Version: r.Version, ID: r.Request.Receipt().String(), Request: r.Request.String(),
		Tenant: r.Tenant.String(), Project: r.Project.String(), Key: r.Key.String(),
		Model: r.Model, Surface: r.Surface, Streamed: r.Streamed,
		Received: r.Received.text(), Admitted: r.Admitted.text(), Committed: r.Committed.text(),
		FirstByte: r.FirstByte.text(), Finished: r.Finished.text(),
		EdgeTokens: r.EdgeTokens, Prefill: r.Prefill.view(), Decode: r.Decode.view(),
		Transport: r.Transport, Output: r.Output, MaxOutput: r.MaxOutput,
		Outcome: string(r.Outcome), Finish: r.Finish, Isolation: string(r.Isolation), Withheld: r.Withheld,
	}
	if !r.ModelDigest.IsZero() {
		v.ModelDigest = "sha256:" + r.ModelDigest.hex()
	}
	if r.Refusal != nil {
		v.Refusal = &refusalView{r.Refusal.Leg, r.Refusal.Reason}
	}
	if r.Response != nil {
		v.Response = &responseView{r.Response.KeyID, r.Response.IDs.hex(), r.Response.Text.hex()}
	}
	if r.Replica != (id.Epoch{}) {
		v.Replica = r.Replica.String()
	}
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("render receipt: %w", err)
	}
	return append(b, '\n'), nil
}

// view is the JSON form. Absent things are left out, except the counts of the
// legs, where null says "not measured".
type view struct {
	Version     uint8         `json:"version"`
	ID          string        `json:"id"`
	Request     string        `json:"request_id"`
	Tenant      string        `json:"tenant_id"`
	Project     string        `json:"project_id"`
	Key         string        `json:"key_id"`
	Model       string        `json:"model,omitempty"`
	ModelDigest string        `json:"model_digest,omitempty"`
	Surface     string        `json:"surface,omitempty"`
	Streamed    bool          `json:"streamed"`
	Received    string        `json:"received_at,omitempty"`
	Admitted    string        `json:"admitted_at,omitempty"`
	Committed   string        `json:"committed_at,omitempty"`
	FirstByte   string        `json:"first_byte_at,omitempty"`
	Finished    string        `json:"finished_at,omitempty"`
	EdgeTokens  *uint32       `json:"edge_tokens"`
	Prefill     *legView      `json:"prefill"`
	Decode      *legView      `json:"decode"`
	Transport   string        `json:"transport,omitempty"`
	Output      uint32        `json:"output_tokens"`
	MaxOutput   uint32        `json:"max_output_tokens"`
	Outcome     string        `json:"outcome"`
	Refusal     *refusalView  `json:"refusal,omitempty"`
	Finish      string        `json:"finish_reason,omitempty"`
	Response    *responseView `json:"response_digests,omitempty"`
	Isolation   string        `json:"isolation,omitempty"`
	Withheld    bool          `json:"withheld"`
	Replica     string        `json:"replica,omitempty"`
}

type legView struct {
	Worker       string       `json:"worker"`
	Build        string       `json:"build,omitempty"`
	Tokens       *uint32      `json:"tokens"`
	Extents      []extentView `json:"extents"`
	ManifestRoot string       `json:"manifest_root,omitempty"`
	HandoffBytes uint64       `json:"handoff_bytes"`
	ComputeUS    uint64       `json:"compute_us"`
	HandoffUS    uint64       `json:"handoff_us"`
	QueueUS      uint64       `json:"queue_us"`
	Cached       uint32       `json:"cached_tokens,omitempty"`
	Unacked      bool         `json:"unacknowledged,omitempty"`
	Quarantined  uint32       `json:"quarantined_pages,omitempty"`
}

type extentView struct {
	First      uint32 `json:"first_page"`
	Count      uint32 `json:"pages"`
	Generation uint64 `json:"generation"`
	Scrubbed   uint32 `json:"scrubbed"`
}

type refusalView struct {
	Leg    string `json:"leg"`
	Reason string `json:"reason"`
}

type responseView struct {
	KeyID string `json:"key_id"`
	IDs   string `json:"ids"`
	Text  string `json:"text"`
}

func (l *Leg) view() *legView {
	if l == nil {
		return nil
	}
	v := &legView{Worker: l.Worker.String(), Build: l.Build, Tokens: l.Tokens, Extents: make([]extentView, len(l.Extents)),
		HandoffBytes: l.HandoffBytes, ComputeUS: l.ComputeUS, HandoffUS: l.HandoffUS, QueueUS: l.QueueUS, Cached: l.Cached, Unacked: l.Unacknowledged, Quarantined: l.Quarantined}
	for i, e := range l.Extents {
		v.Extents[i] = extentView{e.First, e.Count, e.Generation, e.Scrubbed}
	}
	if !l.ManifestRoot.IsZero() {
		v.ManifestRoot = l.ManifestRoot.hex()
	}
	return v
}

func (d Digest) hex() string { return hex.EncodeToString(d[:]) }

// microFormat always shows six digits, so that texts compare.
const microFormat = "2006-01-02T15:04:05.000000Z"

func (m Micros) text() string {
	if m == 0 {
		return ""
	}
	return time.UnixMicro(int64(m)).UTC().Format(microFormat)
}
