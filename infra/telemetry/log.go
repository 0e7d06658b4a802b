package telemetry

import (
	"io"
	"log/slog"
	"os"

	"golang.org/x/term"
)

// NewLogger returns a logger that writes to w. Level is debug, info, warn or
// error; format is text, json, or empty for text on a terminal and json
// elsewhere.
func NewLogger(w io.Writer, level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo // config.Validate has refused anything else
	}
	opts := &slog.HandlerOptions{Level: l}
	if format == "" && IsTerminal(w) || format == "text" {
		return slog.New(slog.NewTextHandler(w, opts))
	}
	return slog.New(slog.NewJSONHandler(w, opts))
}

// IsTerminal reports whether w is a terminal, where people read.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
