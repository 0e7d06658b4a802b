// Package secret holds values that must never be printed.
package secret

import (
	"encoding"
	"encoding/json"
	"fmt"
	"log/slog"
)

// Redacted is what every formatter prints in place of a secret.
const Redacted = "REDACTED"

// String is a text that prints as [Redacted] with every verb, in logs, in JSON
// and in YAML. Reveal is the only way to the value.
//
// The value is behind a pointer because fmt, given a struct pointer and a verb
// that does not fit it, prints unexported fields without asking any Formatter.
type String struct{ value *string }

var (
	_ fmt.Formatter          = String{}
	_ slog.LogValuer         = String{}
	_ json.Marshaler         = String{}
	_ encoding.TextMarshaler = String{}
)

// New wraps a value.
func New(v string) String { return String{value: &v} }

// Reveal returns the value. Call it where the value is used, not before.
func (s String) Reveal() string {
	if s.value == nil {
		return ""
	}
	return *s.value
}

// IsZero reports whether the secret is empty.
func (s String) IsZero() bool { return s.Reveal() == "" }

// Format implements fmt.Formatter, for every verb and flag.
func (s String) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(Redacted)) }

// LogValue implements slog.LogValuer.
func (s String) LogValue() slog.Value { return slog.StringValue(Redacted) }

// MarshalText implements encoding.TextMarshaler.
func (s String) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// MarshalJSON implements json.Marshaler.
func (s String) MarshalJSON() ([]byte, error) { return []byte(`"` + Redacted + `"`), nil }

// UnmarshalText takes the value from configuration.
func (s *String) UnmarshalText(b []byte) error {
	*s = New(string(b))
	return nil
}
