package saga

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated parts of docs/saga.md")

// docs/saga.md shows the state table, and what its events are, as they stand in the code.
func TestDiagramOfTheDocs(t *testing.T) {
	const path, begin, end = "../../docs/saga.md", "<!-- generated from internal/saga/state.go -->\n", "<!-- end -->"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), begin)
	old, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no part between %q and %q", path, begin, end)
	}
	events, meanings := declaredEvents(t)
	want := diagram(events) + "\n" + glossary(t, events, meanings) + "\n" + table(events)
	if *update {
		if err := os.WriteFile(path, []byte(head+begin+want+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if old != want {
		t.Errorf("%s is not what the state table says; run: go test -run TestDiagramOfTheDocs ./internal/saga -update\nwant:\n%s", path, want)
	}
}

// diagram is the table as Mermaid draws it: one arrow for all events between two statuses.
func diagram(events []Event) string {
	var s strings.Builder
	s.WriteString("```mermaid\nstateDiagram-v2\n    [*] --> RUNNING: Start\n")
	for _, from := range Statuses {
		to := map[Status][]string{}
		for _, ev := range sortedEvents(events, from) {
			r := rules[from][ev]
			to[r.to] = append(to[r.to], string(ev))
		}
		for _, status := range Statuses {
			if evs := to[status]; len(evs) > 0 {
				fmt.Fprintf(&s, "    %s --> %s: %s\n", from, status, strings.Join(evs, "<br/>"))
			}
		}
	}
	s.WriteString("    COMPENSATED --> [*]\n    COMPLETED --> [*]\n```\n")
	return s.String()
}

func table(events []Event) string {
	var s strings.Builder
	s.WriteString("| from | event | to | the step becomes | then |\n|---|---|---|---|---|\n")
	for _, from := range Statuses {
		for _, ev := range sortedEvents(events, from) {
			r := rules[from][ev]
			fmt.Fprintf(&s, "| %s | %s | %s | %s | %s |\n", from, ev, r.to, cmp.Or(string(r.step), "–"), cmp.Or(string(r.effect), "–"))
		}
	}
	return s.String()
}

// glossary says what each event is.
func glossary(t *testing.T, events []Event, meanings map[Event]string) string {
	var s strings.Builder
	s.WriteString("| event | what happened |\n|---|---|\n")
	for _, ev := range events {
		m := meanings[ev]
		if m == "" || strings.HasPrefix(m, "likewise") {
			t.Errorf("state.go does not say in a sentence of its own what %s is: %q", ev, m)
			continue
		}
		fmt.Fprintf(&s, "| %s | %s |\n", ev, strings.ToUpper(m[:1])+m[1:])
	}
	return s.String()
}

// declaredEvents returns the events in the order in which they are declared, and the comment of each.
func declaredEvents(t *testing.T) (events []Event, meanings map[Event]string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "state.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	meanings = map[Event]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || fmt.Sprint(spec.Type) != "Event" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, Event(value))
		meanings[Event(value)] = strings.TrimSpace(spec.Comment.Text())
		return true
	})
	return events, meanings
}

// sortedEvents returns the events of a status in the order in which they are declared.
func sortedEvents(events []Event, s Status) []Event {
	list := slices.Collect(maps.Keys(rules[s]))
	slices.SortFunc(list, func(a, b Event) int { return slices.Index(events, a) - slices.Index(events, b) })
	return list
}
