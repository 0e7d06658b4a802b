package openai

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"bulkhead.dev/infra/apperr"
)

// decode reads the body of a request into v. Errors say which field is at fault
// and never what it holds.
func decode(w http.ResponseWriter, r *http.Request, limit int64, v any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return apperr.New(apperr.TooLarge, "request_too_large", "The request body is larger than %d bytes.", limit)
		}
		if r.Context().Err() != nil {
			return apperr.From(r.Context().Err())
		}
		return apperr.Wrap(err, apperr.Invalid, "invalid_body", "The request body could not be read.")
	}
	return unmarshal(b, v)
}

func unmarshal(b []byte, v any) error {
	err := json.Unmarshal(b, v)
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		if errors.Is(e.Err, jsontext.ErrDuplicateName) {
			return apperr.Wrap(err, apperr.Invalid, "duplicate_field", "A field occurs twice.").WithParam(param(e.JSONPointer))
		}
		return apperr.Wrap(err, apperr.Invalid, "invalid_json", "The request body is not valid JSON (near byte %d).", e.ByteOffset)
	}
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		p := param(e.JSONPointer)
		return apperr.Wrap(err, apperr.Invalid, "invalid_type", "%s has the wrong type: want %s.", orBody(p), want(e.GoType)).WithParam(p)
	}
	return apperr.Wrap(err, apperr.Invalid, "invalid_body", "The request body cannot be understood.")
}

// param turns a JSON pointer into the form of OpenAI's errors:
// "/messages/2/content" is "messages[2].content". Only names that we know are
// shown, since an unknown one is a client's text.
func param(p jsontext.Pointer) string {
	var out strings.Builder
	for token := range p.Tokens() {
		if n, err := strconv.ParseUint(token, 10, 32); err == nil {
			fmt.Fprintf(&out, "[%d]", n)
			continue
		}
		if !known[token] {
			return out.String()
		}
		if out.Len() > 0 {
			out.WriteByte('.')
		}
		out.WriteString(token)
	}
	return out.String()
}

func orBody(p string) string {
	if p == "" {
		return "The request body"
	}
	return p
}

// want names a Go type in the words of JSON.
func want(t reflect.Type) string {
	if t == nil {
		return "another type"
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "an array"
	}
	return "an object"
}

// known are the names of all fields that an error may show.
var known = func() map[string]bool {
	out := map[string]bool{}
	var walk func(reflect.Type)
	walk = func(t reflect.Type) {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return
		}
		for i := range t.NumField() {
			f := t.Field(i)
			if f.Anonymous {
				walk(f.Type)
				continue
			}
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			out[name] = true
			walk(f.Type)
		}
	}
	walk(reflect.TypeFor[chatBody]())
	walk(reflect.TypeFor[completionBody]())
	walk(reflect.TypeFor[part]())
	return out
}()
