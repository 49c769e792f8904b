package main

import (
	"fmt"
	"io"

	"github.com/jedib0t/go-pretty/v6/table"

	"backstep/internal/handlers"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// findings are what verify found.
type findings struct {
	OK         bool              `json:"ok"`
	Violations []sqltx.Violation `json:"violations"`
	Warnings   []string          `json:"warnings"`
	Checked    struct {
		Orders   map[string]int      `json:"orders"`
		Sagas    map[saga.Status]int `json:"sagas"`
		Messages int                 `json:"published_messages"`
		Parked   map[string]int      `json:"parked_queues"`
	} `json:"checked"`
}

// perRule is how many violations of one rule are printed.
const perRule = 20

func (f *findings) print(out io.Writer) {
	if len(f.Violations) > 0 {
		t := newTable("what should be", "where", "what is")
		t.SetColumnConfigs([]table.ColumnConfig{wrapAt("what should be", 40), wrapAt("where", 40), wrapAt("what is", 60)})
		for rule, list := range byRule(f.Violations) {
			for _, v := range list[:min(len(list), perRule)] {
				t.AppendRow([]any{rule, v.Subject, v.Detail})
			}
			if len(list) > perRule {
				t.AppendRow([]any{rule, fmt.Sprintf("… and %d more", len(list)-perRule), "--json has them"})
			}
		}
		render(out, t)
		fmt.Fprintln(out)
	}
	for _, w := range f.Warnings {
		fmt.Fprintln(out, "note:", w)
	}
	checked := fmt.Sprintf("%s, %s, %s, %s", plural(sum(f.Checked.Orders), "order"), plural(sum(f.Checked.Sagas), "saga"),
		plural(f.Checked.Messages, "published command"), plural(2*len(handlers.Queues), "queue"))
	if f.OK {
		fmt.Fprintf(out, "every invariant holds: %s\n", checked)
		return
	}
	fmt.Fprintf(out, "%s found in %s\n", plural(len(f.Violations), "violation"), checked)
}

// byRule yields violations by rule, in the order in which the rules come first.
func byRule(violations []sqltx.Violation) func(yield func(string, []sqltx.Violation) bool) {
	return func(yield func(string, []sqltx.Violation) bool) {
		var rules []string
		lists := map[string][]sqltx.Violation{}
		for _, v := range violations {
			if lists[v.Rule] == nil {
				rules = append(rules, v.Rule)
			}
			lists[v.Rule] = append(lists[v.Rule], v)
		}
		for _, r := range rules {
			if !yield(r, lists[r]) {
				return
			}
		}
	}
}

func sum[K comparable](counts map[K]int) int {
	n := 0
	for _, c := range counts {
		n += c
	}
	return n
}
