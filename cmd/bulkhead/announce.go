package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// readyLine is what --json prints when the platform is ready. Fields are only
// ever added.
type readyLine struct {
	URL    string `json:"url"`
	OpsURL string `json:"ops_url"`
	// APIKey is the key that the first start made; empty later, when nobody
	// knows it any more.
	APIKey string         `json:"api_key"`
	Model  string         `json:"model"`
	Data   string         `json:"data"`
	PIDs   map[string]int `json:"pids"`
}

// announce tells a person, or a script, that the platform is ready.
func (p *platform) announce(e *env, asJSON bool, took time.Duration) error {
	line := readyLine{
		URL: p.url, OpsURL: p.opsURL, APIKey: p.firstKey.Reveal(), Model: p.model.Name, Data: p.dir,
		PIDs: map[string]int{"front": os.Getpid(), "prefill": p.prefill.PID(), "decode": p.decode.PID()},
	}
	if p.postgres != nil {
		line.PIDs["postgres"] = p.postgres.PID()
	}
	if asJSON {
		return json.NewEncoder(e.stdout).Encode(line)
	}
	fmt.Fprintf(e.stdout, "\nBulkhead is ready after %.1f s.\n\n  API         %s/v1\n  operations  %s/metrics\n  model       %s\n  data        %s\n",
		took.Seconds(), p.url, p.opsURL, p.model.Name, p.dir)
	if p.firstKey.IsZero() {
		fmt.Fprintf(e.stdout, "\nUse the API key of the first start, or make another: bulkhead key create\n")
	} else {
		fmt.Fprintf(e.stdout, "\nYour API key, shown this once:\n\n  export BULKHEAD_API_KEY=%s\n", p.firstKey.Reveal())
	}
	_, err := fmt.Fprintf(e.stdout, `
Ask it something:

  curl %s/v1/chat/completions -H "Authorization: Bearer $BULKHEAD_API_KEY" -H "Content-Type: application/json" \
    -d '{"model": "%s", "temperature": 0.2, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

  bulkhead chat --temperature 0.2 "Why is the sky blue?"

`, p.url, p.model.Name)
	return err
}
