package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// row is a line of the table. A row without a goal is there to compare with.
type row struct {
	what, goal, figure string
	judged, met        bool
}

type table struct{ rows []row }

// note adds a row that has no goal.
func (t *table) note(what, format string, args ...any) {
	t.rows = append(t.rows, row{what: what, figure: fmt.Sprintf(format, args...)})
}

// judge adds a row with a goal.
func (t *table) judge(what, goal string, met bool, format string, args ...any) {
	t.rows = append(t.rows, row{what: what, goal: goal, figure: fmt.Sprintf(format, args...), judged: true, met: met})
}

// print writes the table as Markdown, aligned for terminals.
func (t *table) print(w io.Writer) {
	lines := [][]string{{"measured", "goal", "figure", ""}, nil}
	for _, r := range t.rows {
		verdict := ""
		if r.judged {
			verdict = "missed"
			if r.met {
				verdict = "met"
			}
		}
		lines = append(lines, []string{r.what, r.goal, r.figure, verdict})
	}
	var widths [4]int
	for _, l := range lines {
		for i, cell := range l {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	for _, l := range lines {
		for i, width := range widths {
			if l == nil {
				fmt.Fprintf(w, "| %s ", strings.Repeat("-", max(width, 3)))
				continue
			}
			fmt.Fprintf(w, "| %s%s ", l[i], strings.Repeat(" ", max(width, 3)-len([]rune(l[i]))))
		}
		fmt.Fprintln(w, "|")
	}
}

// median of figures that are not empty.
func median(of []float64) float64 {
	s := slices.Sorted(slices.Values(of))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// over is the median over rounds.
func over[T any](rounds []T, f func(T) float64) float64 {
	var v []float64
	for _, r := range rounds {
		v = append(v, f(r))
	}
	return median(v)
}
