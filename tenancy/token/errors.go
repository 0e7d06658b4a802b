package token

import (
	"time"

	"bulkhead.dev/infra/apperr"
)

// Reason says which rule a token broke. It is the cause of an *apperr.Error of the
// kind Unauthenticated: for logs and metrics of the platform, not for the caller. It has no
// part of the token.
type Reason string

// The reasons.
const (
	ReasonSize      Reason = "size"             // longer than MaxSize
	ReasonMalformed Reason = "malformed"        // not three segments of strict base64url with strict JSON in them
	ReasonHeader    Reason = "header"           // a header field that is refused, or of the wrong type
	ReasonAlgorithm Reason = "algorithm"        // not one that is allowed
	ReasonType      Reason = "type"             // made for another purpose
	ReasonIssuer    Reason = "issuer"           // no such issuer is trusted
	ReasonKey       Reason = "key"              // the issuer has no such key for signatures of this algorithm
	ReasonSignature Reason = "signature"        // does not fit the content
	ReasonClaims    Reason = "claims"           // a claim that is needed is absent, or one is of the wrong type
	ReasonAudience  Reason = "audience"         // for nobody who is configured here
	ReasonAmbiguous Reason = "ambiguous"        // for more than one of those who are configured
	ReasonExpired   Reason = "expired"          // exp has passed
	ReasonNotYet    Reason = "not_yet_valid"    // nbf is to come
	ReasonFuture    Reason = "issued_in_future" // iat is to come
	ReasonLifetime  Reason = "lifetime"         // longer than allowed, or it ends before it begins
)

// Error implements error.
func (r Reason) Error() string { return "token refused: " + string(r) }

// refuse makes the error for a token that is not good. Only the reasons that say
// something about a token whose signature was good show in the message.
func refuse(r Reason) *apperr.Error {
	message := "The token is not valid."
	if r == ReasonExpired {
		message = "The token has expired. Get a new one."
	}
	return apperr.Wrap(r, apperr.Unauthenticated, "invalid_token", "%s", message).WithNoRetry()
}

// cannotCheck makes the error for a token about which nothing can be said now.
func cannotCheck(cause error, retryAfter time.Duration) *apperr.Error {
	return apperr.Wrap(cause, apperr.Unavailable, "token_check_unavailable",
		"The token cannot be checked now. It may well be valid; try again.").WithRetryAfter(max(retryAfter, time.Second))
}
