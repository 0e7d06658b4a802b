package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

// upstreamMark starts this program as the bare upstream.
const upstreamMark = "bare-upstream"

// upstreamMain serves chat completions with as little work as an HTTP server in Go
// can do: it parses the request and answers from memory. It ends with its standard input.
func upstreamMain() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", complete)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = s.Close()
	}()
	if _, err := fmt.Println("http://" + l.Addr().String()); err != nil {
		return err
	}
	if err := s.Serve(l); err != http.ErrServerClosed { //nolint:errorlint // it is returned as it is
		return err
	}
	return nil
}

const (
	bareID    = `"id":"chatcmpl-00000000000000000000000000","object":"chat.completion`
	bareModel = `","created":1700000000,"model":"bench","choices":[`
	bareUsage = `"usage":{"prompt_tokens":60,"completion_tokens":16,"total_tokens":76}`
	bareEvent = "data: {" + bareID + ".chunk" + bareModel + `{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}]}` + "\n\n"
)

func complete(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		Stream    bool `json:"stream"`
		MaxTokens int  `json:"max_tokens"`
	}
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		http.Error(w, "not JSON", http.StatusBadRequest)
		return
	}
	if !asked.Stream {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{"+bareID+bareModel+`{"index":0,"message":{"role":"assistant","content":"`+
			strings.Repeat("a few words ", 5)+`"},"logprobs":null,"finish_reason":"length"}],`+bareUsage+"}")
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	chunk := fmt.Sprintf(bareEvent, `"content":" words"`, "null")
	for range asked.MaxTokens {
		if _, err := io.WriteString(w, chunk); err != nil || out.Flush() != nil {
			return
		}
	}
	_, _ = io.WriteString(w, fmt.Sprintf(bareEvent, "", `"length"`)+"data: [DONE]\n\n")
}

// upstream is the bare upstream in a process of its own.
type upstream struct {
	url string
	cmd *exec.Cmd
	in  io.Closer
}

func startUpstream(ctx context.Context) (*upstream, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	u := &upstream{cmd: exec.CommandContext(ctx, exe, upstreamMark)}
	u.cmd.Stderr = os.Stderr
	if u.in, err = u.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := u.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := u.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the bare upstream: %w", err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("start the bare upstream: %w", err)
	}
	u.url = strings.TrimSpace(line)
	return u, nil
}

func (u *upstream) close() error {
	_ = u.in.Close()
	return u.cmd.Wait()
}
