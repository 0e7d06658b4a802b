package token

import "time"

// The constants that tests go to the edge of.
const (
	KeysRenewAfter = keysRenewAfter
	KeysWaitAfter  = keysWaitAfter
	KeysServeFor   = keysServeFor
	FetchEvery     = fetchEvery
	VerifiedFor    = verifiedFor
	MaxDocument    = maxDocument
	MaxVerified    = maxVerified
	PlatformSkew   = platformSkew
)

// SetFetchTimeout makes fetches end sooner, for issuers that never answer.
func SetFetchTimeout(v *Verifier, d time.Duration) { v.keys.limit = d }

// Remembered returns how many verified tokens are remembered.
func Remembered(v *Verifier) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.verified.Len()
}

// Public reports whether an issuer may be at an address that no option names.
var Public = public

// ParseKeys reads a key set.
func ParseKeys(b []byte) (int, error) {
	keys, err := parseKeys(b)
	return len(keys), err
}

// AwaitFetches waits until no fetch is under way.
func AwaitFetches(v *Verifier) { v.keys.wg.Wait() }
