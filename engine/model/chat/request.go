package chat

import (
	"strconv"
	"time"
)

// variables are what a template sees beside the messages.
type variables struct {
	// bos and eos are the texts of these tokens; a template of a model without
	// one sees the variable undefined.
	bos, eos string
}

// appendRequest appends a render request, as guest/src/request.rs reads it. The
// variables and their order are those of Hugging Face's apply_chat_template
// without tools. Contents must be valid UTF-8.
func appendRequest(b []byte, msgs []Message, v variables, now time.Time, fuel, maxOut int) []byte {
	b = append(b, `{"now":[`...)
	// Monday is 0 for the guest, Sunday for Go.
	weekday := (int(now.Weekday()) + 6) % 7
	for i, n := range []int{now.Year(), int(now.Month()), now.Day(), now.Hour(), now.Minute(), now.Second(), weekday} {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	b = append(b, `],"fuel":`...)
	b = strconv.AppendInt(b, int64(fuel), 10)
	b = append(b, `,"max_out":`...)
	b = strconv.AppendInt(b, int64(maxOut), 10)
	b = append(b, `,"ctx":{"messages":[`...)
	for i, m := range msgs {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"role":`...)
		b = appendString(b, m.Role)
		b = append(b, `,"content":`...)
		b = appendString(b, m.Content)
		b = append(b, '}')
	}
	b = append(b, `],"tools":null,"documents":null,"add_generation_prompt":true`...)
	if v.bos != "" {
		b = appendString(append(b, `,"bos_token":`...), v.bos)
	}
	if v.eos != "" {
		b = appendString(append(b, `,"eos_token":`...), v.eos)
	}
	return append(b, "}}"...)
}

// appendString appends s as a JSON string. Only what must be escaped is, so that
// the request has about the length of the conversation.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[from:i]...)
		from = i + 1
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, '\\', 'n')
		case '\t':
			b = append(b, '\\', 't')
		case '\r':
			b = append(b, '\\', 'r')
		default:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}
