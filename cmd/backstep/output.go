package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
)

// newTable returns a table to append rows to; render prints it.
func newTable(header ...any) table.Writer {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Options = table.OptionsNoBordersAndSeparators
	t.Style().Options.SeparateHeader = true
	t.Style().Format.Header = text.FormatUpper
	t.SuppressTrailingSpaces()
	t.AppendHeader(header)
	return t
}

func render(w io.Writer, t table.Writer) { fmt.Fprintln(w, t.Render()) }

// wrapAt breaks the texts of a column that is wider than this into lines.
func wrapAt(column string, width int) table.ColumnConfig {
	return table.ColumnConfig{Name: column, WidthMax: width, WidthMaxEnforcer: text.WrapSoft}
}

// reasonWidth is how many columns of a reason a list shows: what shows one thing has all of it.
const reasonWidth = 80

// reasonCell is a reason as a list shows it: its start, on one line, whatever is in it.
func reasonCell(reason string) string {
	return text.Snip(printable(strings.Join(strings.Fields(reason), " ")), reasonWidth, "…")
}

// columns aligns what is written with tabs.
func columns(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// printJSON writes v, indented for a person, as one value for a program.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// isTerminal reports whether w shows what is written to a person at once.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// short is d in as many digits as a person wants to read.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + short(-d)
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < 48*time.Hour:
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// clock is a time as a person reads it; "" if it is none.
func clock(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04:05.000")
}

// plural returns "1 order", "2 orders".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// printFirst prints the first of a list, a line each, and how many more there are.
func printFirst[T any](out io.Writer, list []T, noun string, line func(*T) string) {
	for i := range list[:min(len(list), maxFaults)] {
		fmt.Fprintln(out, line(&list[i]))
	}
	if n := len(list) - maxFaults; n > 0 {
		fmt.Fprintf(out, "and %s more; --json has all\n", plural(n, noun))
	}
}

// plainLog writes log records as a person reads them: "message: key value, key value".
type plainLog struct{ w io.Writer }

func (plainLog) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (p plainLog) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Message)
	sep := ": "
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, "%s%s %s", sep, a.Key, a.Value)
		sep = ", "
		return true
	})
	_, err := fmt.Fprintln(p.w, b.String())
	return err
}

func (p plainLog) WithAttrs([]slog.Attr) slog.Handler { return p } // nobody uses them here
func (p plainLog) WithGroup(string) slog.Handler      { return p }
