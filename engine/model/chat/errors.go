package chat

import (
	"encoding/hex"
	"errors"
	"fmt"
)

var (
	// ErrTemplate reports that a template could not render a conversation, or
	// could not be compiled: it is wrong, or it went beyond a bound.
	ErrTemplate = errors.New("chat template failed")
	// ErrBudget reports a template that went beyond its time, memory,
	// instructions or output. It comes together with ErrTemplate.
	ErrBudget = errors.New("chat template went beyond a bound")
	// ErrClosed reports the use of a closed Engine or Template.
	ErrClosed = errors.New("chat template is closed")
)

// Private is a cause that may hold text of a client, because templates put
// messages into their errors. Its Error says nothing; the text has to be asked
// for, and belongs neither into logs nor into answers.
type Private struct{ text string }

// Error implements error with a constant text.
func (p *Private) Error() string { return "private cause" }

// Text returns what the template or the sandbox said.
func (p *Private) Text() string { return p.text }

// Reasons of a Refused.
const (
	ReasonEmpty    = "messages must not be empty"
	ReasonRole     = "role must be one of system, developer, user and assistant"
	ReasonTool     = "messages of role tool or function are not supported"
	ReasonUTF8     = "content is not valid UTF-8"
	ReasonMessages = "too many messages"
	ReasonContent  = "messages are too long"
	ReasonPrivate  = "messages use too many private use characters"
	ReasonTemplate = "the chat template of this model does not accept this sequence of messages"
)

// Refused says that a conversation cannot be rendered, and that it is the
// conversation's fault.
type Refused struct {
	// Reason is one of the constants. It holds no text of the client.
	Reason string
	// Message is the index of the message at fault, or -1.
	Message int

	cause error
}

// Error returns the reason.
func (e *Refused) Error() string { return e.Reason }

// Unwrap returns the cause, a *Private, or nil.
func (e *Refused) Unwrap() error { return e.cause }

// Failed says that a template failed, and that it is the template's fault. It
// wraps ErrTemplate, and ErrBudget where a bound was hit.
type Failed struct {
	// Stage is "compile" or "render".
	Stage string
	// Budget tells that a bound was hit.
	Budget bool

	cause *Private
}

// Error names the stage only.
func (e *Failed) Error() string {
	if e.Budget {
		return fmt.Sprintf("%s: %v", e.Stage, ErrBudget)
	}
	return fmt.Sprintf("%s: %v", e.Stage, ErrTemplate)
}

// Unwrap returns the sentinels and the private cause.
func (e *Failed) Unwrap() []error {
	errs := []error{ErrTemplate}
	if e.Budget {
		errs = append(errs, ErrBudget)
	}
	if e.cause != nil {
		errs = append(errs, e.cause)
	}
	return errs
}

// UnsupportedTemplate says that a template is not served.
type UnsupportedTemplate struct {
	// Digest is the SHA-256 of the template's source.
	Digest [32]byte
	// Reason tells the operator of the model why. It holds text of the template
	// at most.
	Reason string

	cause error
}

// Error returns the digest and the reason.
func (e *UnsupportedTemplate) Error() string {
	return "chat template sha256:" + hex.EncodeToString(e.Digest[:]) + " is not supported: " + e.Reason
}

// Unwrap returns the failure of a probe, or nil.
func (e *UnsupportedTemplate) Unwrap() error { return e.cause }
