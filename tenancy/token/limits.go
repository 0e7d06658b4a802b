package token

import "time"

// Bounds of what a token may be. All apply before a signature is looked at.
const (
	// MaxSize is the longest token, in bytes. Headers of common servers and
	// proxies end at 8 KiB too, so nothing longer would arrive anyway.
	MaxSize = 8 << 10
	// MaxLifetime is the longest time from iat to exp. Nothing can call a token
	// back before it expires except taking the issuer's key or the user away.
	MaxLifetime = 24 * time.Hour
	// MaxClockSkew is how far the clock of an issuer may be declared to differ.
	MaxClockSkew = 2 * time.Minute

	maxHeader       = 2 << 10      // bytes of the decoded header; real ones have 50 to 300
	maxHeaderFields = 16           // real ones have 2 to 6
	maxClaims       = 128          // claims of a token at the top; bounds what one costs in memory
	maxAudiences    = 16           // values of aud
	maxText         = 255          // bytes of a subject, a key id, a token id; OpenID Connect allows a subject as many
	maxEmail        = 320          // bytes of an e-mail address, as in RFC 3696
	maxTime         = 253402300799 // seconds; the last of the year 9999
)

// Bounds of a configured issuer.
const (
	maxURL      = 512 // bytes
	maxDepth    = 4   // parts of the path to a claim
	maxName     = 255 // bytes of the name of a claim, of a value, of a role
	maxRequired = 8   // claims that a token must have
	maxRoles    = 200 // lines of the map from claim values to roles
)

// How old knowledge of an issuer's keys may be, counted from the beginning of the
// fetch that brought it.
const (
	// keysRenewAfter is when the next token starts a fetch that nobody waits for.
	keysRenewAfter = 4 * time.Minute
	// keysWaitAfter is when the next token waits for a fetch. A key that an issuer
	// has withdrawn is refused after it wherever the issuer answers.
	keysWaitAfter = 5 * time.Minute
	// keysServeFor is how long keys serve while their issuer does not answer.
	keysServeFor = 10 * time.Minute
	// fetchEvery is the least time between the beginnings of two fetches of one
	// issuer's keys, whatever the reason: expiry, a key id that is not known, or a
	// fetch that failed. So a flood of made-up key ids costs the issuer six fetches a
	// minute, and a key that an issuer starts to use is known ten seconds later.
	fetchEvery = 10 * time.Second
	// fetchFor bounds one fetch: discovery and keys together.
	fetchFor = 5 * time.Second
)

// Bounds of what an issuer may answer, and of what is remembered.
const (
	maxDocument       = 256 << 10  // bytes of a discovery document or a key set; real ones have 1 to 20 KiB
	maxResponseHeader = 16 << 10   // bytes
	maxKeys           = 100        // of one issuer; real ones have 1 to 10
	minRSA, maxRSA    = 2048, 8192 // bits of a modulus: not weak, and not a way to burn processor time
	maxSources        = 1000       // issuers whose keys are remembered
	maxVerified       = 4096       // verified tokens; a common one takes 3 KiB, the largest 20 KiB

	// verifiedFor is how long the outcome of checking a signature is remembered. It
	// ends earlier at exp and when the keys of the issuer are renewed.
	verifiedFor = time.Minute
)
