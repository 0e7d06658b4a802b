package httpx

import (
	"net/http"
	"strings"
)

// forwarded returns the hops that X-Forwarded-For names, in order.
func forwarded(r *http.Request) []string {
	var hops []string
	for _, line := range r.Header.Values("X-Forwarded-For") {
		for hop := range strings.SplitSeq(line, ",") {
			hops = append(hops, strings.TrimSpace(hop))
		}
	}
	return hops
}
