package openai

import (
	"net/http"
	"strconv"
	"time"

	"bulkhead.dev/tenancy/quota"
)

// rateLimits sets the headers that SDKs and their users read to pace themselves.
func rateLimits(h http.Header, s quota.Status) {
	for name, r := range map[string]quota.Rate{"Requests": s.Requests, "Tokens": s.Tokens} {
		if r.Limit == 0 {
			continue // there is no such rate
		}
		h.Set("X-Ratelimit-Limit-"+name, strconv.FormatInt(r.Limit, 10))
		h.Set("X-Ratelimit-Remaining-"+name, strconv.FormatInt(r.Remaining, 10))
		h.Set("X-Ratelimit-Reset-"+name, r.Reset.Round(time.Millisecond).String())
	}
}
