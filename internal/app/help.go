package app

import (
	"reflect"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// Help describes the variables that cfg is read from, for --help.
func Help(cfg any) string { return variables(cfg) + "\n\n" + notes }

var notes = strings.Join(secrets, ", ") + `
may be in a file instead: then set the same name with _FILE to its path. What is
set and empty is refused, and so is a name with BACKSTEP_ that no binary knows.
Traces are set up by the standard variables, OTEL_EXPORTER_OTLP_ENDPOINT first.`

// meaningWidth makes the table fit into a terminal of 80 columns.
const meaningWidth = 34

// variables is the table of them.
func variables(cfg any) string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Options = table.OptionsNoBordersAndSeparators
	t.Style().Box.PaddingLeft, t.Style().Box.PaddingRight = "", "  "
	t.SuppressTrailingSpaces()
	t.AppendHeader(table.Row{"variable", "default", "meaning"})
	for _, f := range fields(Prefix, reflect.ValueOf(cfg).Elem()) {
		t.AppendRow(table.Row{f.name, f.shownDefault(), f.meaning()})
	}
	return t.Render()
}

func (f field) shownDefault() string {
	if f.def.Tag.Get("required") == "true" {
		return "(required)"
	}
	return f.def.Tag.Get("default")
}

// meaning is the description and, on lines of their own, what a value must look like.
func (f field) meaning() string {
	lines := []string{text.WrapSoft(f.def.Tag.Get("desc"), meaningWidth)}
	e, r := f.def.Tag.Get("example"), f.def.Tag.Get("range")
	if e != "" && r == "" { // an address, which says more than words
		lines = append(lines, e)
	}
	switch {
	case r != "":
		lines = append(lines, "must be "+r)
	case f.is(boolType):
		lines = append(lines, "must be true or false")
	}
	return strings.Join(lines, "\n")
}
