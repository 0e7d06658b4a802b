package handoff

// Reason says why a hand-off did not happen. The list is closed: receipts and
// alarms are built on it.
type Reason string

// The reasons.
const (
	BadManifest   Reason = "bad_manifest"   // not a canonical manifest of this version
	WrongTransfer Reason = "wrong_transfer" // nobody announced this transfer here
	WrongRequest  Reason = "wrong_request"  // the manifest is for another request
	WrongNonce    Reason = "wrong_nonce"    // the manifest is not for this attempt
	WrongOwner    Reason = "wrong_owner"    // the pages belong to another owner
	WrongEpoch    Reason = "wrong_epoch"    // from, or to, another run of a worker
	WrongModel    Reason = "wrong_model"    // computed with other weights
	WrongGeometry Reason = "wrong_geometry" // pages of another shape
	WrongTokens   Reason = "wrong_tokens"   // computed from other token ids
	WrongVersion  Reason = "wrong_version"  // of the hand-off; another one was agreed on
	WrongPreview  Reason = "wrong_preview"  // the pages pulled early are not those of the manifest
	Coverage      Reason = "coverage"       // not exactly the announced positions
	Digest        Reason = "digest"         // a page holds other bytes than were offered
	Generation    Reason = "generation"     // a page was given up by the prefill leg meanwhile
	Replay        Reason = "replay"         // the transfer was pulled before
	Exhausted     Reason = "exhausted"      // the credits do not cover the prompt
	Fabric        Reason = "fabric"         // the pages could not be read
	Canceled      Reason = "canceled"       // given up by this side
)

// Reasons returns all reasons.
func Reasons() []Reason {
	return []Reason{
		BadManifest, WrongTransfer, WrongRequest, WrongNonce, WrongOwner, WrongEpoch, WrongModel, WrongGeometry,
		WrongTokens, WrongVersion, WrongPreview, Coverage, Digest, Generation, Replay, Exhausted, Fabric, Canceled,
	}
}

// Refusal is the only way in which a hand-off fails. Err has the details for
// the operator; it holds no content of a client.
type Refusal struct {
	Reason Reason
	Err    error // may be nil
}

func (r *Refusal) Error() string {
	if r.Err == nil {
		return "hand-off refused: " + string(r.Reason)
	}
	return "hand-off refused: " + string(r.Reason) + ": " + r.Err.Error()
}

// Unwrap returns the details.
func (r *Refusal) Unwrap() error { return r.Err }

func refuse(reason Reason, err error) *Refusal { return &Refusal{Reason: reason, Err: err} }
