package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// plans are the shapes of the plans of each statement: which nodes over which
// tables by which indexes, without costs.
type plans map[string]map[string]bool

// node is what counts of a node of a plan.
type node struct {
	Type     string `json:"Node Type"`
	Table    string `json:"Relation Name"`
	Index    string `json:"Index Name"`
	Children []node `json:"Plans"`
}

func (n node) String() string {
	parts := []string{n.Type}
	for _, s := range []string{n.Table, n.Index} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	s := strings.Join(parts, " ")
	for _, c := range n.Children {
		s += "(" + c.String() + ")"
	}
	return s
}

// readPlans reads what auto_explain wrote into a log: JSON in lines that begin
// with a tab.
func readPlans(log []byte) plans {
	out := plans{}
	for _, entry := range bytes.Split(log, []byte("plan:\n"))[1:] {
		var text []byte
		for line := range bytes.Lines(entry) {
			if line[0] != '\t' {
				break
			}
			text = append(text, line[1:]...)
		}
		var p struct {
			Text string `json:"Query Text"`
			Plan node
		}
		if json.Unmarshal(text, &p) != nil {
			continue // the last entry may be cut
		}
		statement := strings.Join(strings.Fields(p.Text), " ")
		if out[statement] == nil {
			out[statement] = map[string]bool{}
		}
		out[statement][p.Plan.String()] = true
	}
	return out
}

// grown are the tables that are larger in the big database.
var grown = []string{"tenant", "project", "api_key", "quota_limit"}

// differences says which plans the big database has that the small one has not,
// and where it reads a large table from end to end.
func (small plans) differences(big plans) []string {
	var out []string
	for _, statement := range slices.Sorted(maps.Keys(big)) {
		known, ok := small[statement]
		if !ok {
			continue // what one request in a thousand does
		}
		for shape := range big[statement] {
			scans := slices.ContainsFunc(grown, func(t string) bool { return strings.Contains(shape+")", "Seq Scan "+t+")") })
			if !known[shape] || scans {
				out = append(out, fmt.Sprintf("%s\n  big:   %s\n  small: %s", statement, shape, strings.Join(slices.Sorted(maps.Keys(known)), " | ")))
			}
		}
	}
	return out
}
