// Package token knows bearer tokens that are JSON Web Tokens: those of external OpenID Connect
// issuers, which it checks ([Verifier]), and those of the platform, which it makes and checks ([Mint]). It
// knows nothing of HTTP, users or databases, and tenancy may import it.
//
// # What every token must be
//
// At most 8 KiB; three segments of base64url, of which each has one text; header and payload JSON
// without a name that stands twice, at any depth, names compared exactly; an algorithm that is on the
// list, which has asymmetric ones only; no header field that brings a key, points to one or
// changes the meaning of the rest (jwk, jku, x5u, x5c, crit, ...), whatever its value; a typ that says
// nothing else than what is expected. Then a signature by a key that fits the algorithm; exp
// and iat; nbf, if any, past; a lifetime of at most 24 hours. A token that breaks a rule is refused with
// invalid_token, always the same message unless it only has expired; the [Reason] is the cause.
//
// # Tokens of external issuers
//
// Nothing in a token is believed before its signature is checked. What it says of itself selects:
// iss among the issuers that are configured, by equality of bytes; kid among the keys that this issuer
// has published. Keys are remembered by issuer, so that a key of one issuer never checks a
// token that names another, even where both call it "k1".
//
// Several tenants may trust one URL. After the signature is checked, exactly one [Issuer] must fit the audience and
// the claims that it requires. Where several fit, the token is refused: so who can
// configure what another tenant has configured can lock its users out, but never let them in elsewhere. [Issuer.Overlaps]
// is for those who store issuers to refuse that. A token may have other audiences too; the issuer vouches for those.
//
// Who it is, is the issuer and the subject together. E-mail addresses are labels. Roles are the values that the
// issuer's configuration translates; others mean nothing.
//
// # Keys of issuers
//
// Keys come from discovery and the key set that it names, fetched together. No fetch of one issuer begins
// within 10 seconds of the last, whether it is for expired keys, for a key id that is not known, or after a
// failure; any number of callers wait for one. So made-up key ids cost an issuer six
// fetches a minute at most, and a new key may be unknown for 10 seconds. (The key set of go-oidc fetches for each unknown
// id, so it is not used.)
//
// Keys are used as they are for 4 minutes; then the next token starts a renewal in the background; after
// 5 minutes a token waits for it. So a key that the issuer withdrew is refused after 5
// minutes of use, or, where the issuer does not answer, after 10: for so long the keys of an issuer that is down serve. After
// that, and whenever a key cannot be looked for, the answer is token_check_unavailable with a
// time to try again: not to know is never reported as a bad token.
//
// # What is connected to
//
// Issuers are configured by tenants, so where they are is not trusted. URLs are https (http on a loopback
// address); the address that a name resolves to must be of the Internet or in [Options].Internal,
// and this is decided when the connection is made; redirects are not followed and proxies not used; a document
// has at most 256 KiB, and both together take at most 5 seconds. Errors hold nothing of what
// an issuer answered.
//
// # What is remembered
//
// That a signature was good, for a minute at most and not beyond exp, by the SHA-256 of the whole token. Part of
// a token would not do: two tokens may share everything but the signature. Which issuers
// are trusted, their keys, the time, the audience, and what claims mean are decided on each call, so
// nothing outlives a removed issuer but what [Issuers] itself remembers (a second).
//
// # Tokens of the platform
//
// [Mint] signs with Ed25519. The seeds are in the key file by name, and the name is the key id. All keys in
// the file are accepted and one signs. To rotate: add a key to the file of every replica, then make
// it the current one, and take the old one out a quarter of an hour later, when no token of it lives. Taking it out at once
// ends all of its tokens.
//
// They are good for at most 15 minutes, name a user, a tenant (or none, for operators), roles, scopes that restrict them, and in act the operator
// who acts for the user. Their typ, iss and aud are the platform's own, and claims that are not known are
// refused, as they could restrict. No external issuer can be configured with their iss, which is no URL. The two kinds
// cannot be taken for each other: each verifier requires its own typ, iss and keys.
package token
