package tenancy

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"strings"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
)

// Principal is who makes a request, as authentication found it.
type Principal struct {
	Tenant  id.Tenant
	Project id.Project
	Key     id.Key
	Owner   id.Owner // see [OwnerTag]
	Scopes  Scopes
}

// Scopes is a set of things a key may do.
type Scopes uint32

// The scopes. Their texts are stored and shown; the bits are not.
const (
	ScopeInference    Scopes = 1 << iota // "inference": generate, list models
	ScopeKeysRead                        // "keys:read": list projects and keys
	ScopeKeysWrite                       // "keys:write": create projects and keys, revoke keys
	ScopeReceiptsRead                    // "receipts:read": fetch receipts
	ScopeUsageRead                       // "usage:read": fetch usage
	ScopePlatform                        // "platform:admin": the operator; tenants and everything that spans them
	ScopeLimitsRead                      // "limits:read": see limits, and what is taken of them
	ScopeLimitsWrite                     // "limits:write": set limits of the tenant's own

	// ScopesTenant is everything that a tenant can be given.
	ScopesTenant = ScopeInference | ScopeKeysRead | ScopeKeysWrite | ScopeReceiptsRead | ScopeUsageRead | ScopeLimitsRead | ScopeLimitsWrite
	// ScopesDefault is what a new key gets when nothing is asked for.
	ScopesDefault = ScopeInference | ScopeReceiptsRead
)

var scopeNames = [...]string{"inference", "keys:read", "keys:write", "receipts:read", "usage:read", "platform:admin", "limits:read", "limits:write"}

// ParseScopes reads the texts of scopes. An unknown one is an *apperr.Error of
// kind Invalid that names it.
func ParseScopes(texts []string) (Scopes, error) {
	var s Scopes
next:
	for _, text := range texts {
		for i, name := range scopeNames {
			if text == name {
				s |= 1 << i
				continue next
			}
		}
		return 0, apperr.New(apperr.Invalid, "unknown_scope", "There is no such scope; the scopes are %s.",
			strings.Join(scopeNames[:], ", ")).WithParam("scopes")
	}
	return s, nil
}

// Has reports whether the set holds all of want.
func (s Scopes) Has(want Scopes) bool { return s&want == want }

// Strings returns the texts, in a fixed order.
func (s Scopes) Strings() []string {
	var out []string
	for i, name := range scopeNames {
		if s.Has(1 << i) {
			out = append(out, name)
		}
	}
	return out
}

func (s Scopes) String() string { return strings.Join(s.Strings(), " ") }

// Require returns nil if the principal has all of want, and otherwise an
// *apperr.Error of kind Forbidden that names what is missing.
func (p Principal) Require(want Scopes) error {
	if p.Scopes.Has(want) {
		return nil
	}
	return apperr.New(apperr.Forbidden, "insufficient_scope", "The API key lacks the scope %s.", want&^p.Scopes)
}

// OwnerTag derives the tag under which pages of a tenant are held on every
// worker. Raising the isolation epoch of a tenant makes a new tag, and so drops
// everything that is cached for the tenant.
func OwnerTag(platformKey [32]byte, tenant id.Tenant, isolationEpoch int64) id.Owner {
	m := hmac.New(sha256.New, platformKey[:])
	m.Write([]byte("bulkhead owner tag v1\x00"))
	m.Write(tenant[:])
	var epoch [8]byte
	binary.BigEndian.PutUint64(epoch[:], uint64(isolationEpoch))
	m.Write(epoch[:])
	return id.Owner(m.Sum(nil)[:16])
}
