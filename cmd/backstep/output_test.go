package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"backstep/internal/inbox"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

func TestShort(t *testing.T) {
	tests := []struct {
		d    time.Duration
		want string
	}{
		{0, "0s"},
		{1234 * time.Microsecond, "1ms"},
		{2345 * time.Millisecond, "2.3s"},
		{-2345 * time.Millisecond, "-2.3s"},
		{61*time.Second + 400*time.Millisecond, "1m1s"},
		{50 * time.Hour, "2d2h"},
	}
	for _, tt := range tests {
		if got := short(tt.d); got != tt.want {
			t.Errorf("short(%s) = %q, want %q", tt.d, got, tt.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	tests := []struct {
		in   []time.Duration
		p    float64
		want time.Duration
	}{
		{hundred, 0.50, 50},
		{hundred, 0.99, 99},
		{hundred[:1], 0.99, 1},
		{hundred[:2], 0.50, 1},
		{hundred[:3], 0.50, 2},
	}
	for _, tt := range tests {
		if got := percentile(tt.in, tt.p); got != tt.want {
			t.Errorf("percentile of %d at %v = %d, want %d", len(tt.in), tt.p, got, tt.want)
		}
	}
}

func TestVhost(t *testing.T) {
	for url, want := range map[string]string{
		"amqp://a:b@h":         "/",
		"amqp://a:b@h:5672/":   "/",
		"amqp://a:b@h/orders":  "orders",
		"amqp://a:b@h/%2F":     "/",
		"amqp://a:b@h/a%2Fb":   "a/b",
		"amqp://a:b@h/v?x=y":   "v",
		"amqp://a:b@h/%2Fdemo": "/demo",
	} {
		if got, err := vhost(url); got != want || err != nil {
			t.Errorf("vhost(%q) = %q, %v, want %q", url, got, err, want)
		}
	}
}

// TestReasonIsALine: however long a reason is, and whatever is in it, lists show it on a line that can be
// read, and what shows one thing has the whole of it.
func TestReasonIsALine(t *testing.T) {
	const start = "charge-payment: gateway says: "
	for name, tt := range map[string]struct{ reason, shows string }{
		"short":        {start + "no", start + "no"},
		"4 KB":         {start + strings.Repeat("away, ", 700), start + "away, away, away, away, away, away, away, away, a…"},
		"wide":         {start + strings.Repeat("山田", 700), start + strings.Repeat("山田", 12) + "…"},
		"no UTF-8":     {start + strings.Repeat("\xff", 4000), start + strings.Repeat(`\xff`, 12) + `\…`},
		"a stack":      {start + "\npanic\r\n\tat main()\n\n" + strings.Repeat("\n\tat f()", 500), start + "panic at main() at f() at f() at f() at f() at f(…"},
		"steers":       {start + "\x1b[2J\x1b]0;title\a\u202e\x00", start + `\x1b[2J\x1b]0;title\a\u202e\x00`},
		"only a break": {"\n\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := &cobra.Command{}
			cmd.SetOut(&out)
			s := saga.Summary{ID: "s", Type: "place-order", Status: saga.ManualAction, LastError: tt.reason}
			groups := &parkedGroups{}
			groups.add(&inbox.Parked{Queue: "payment", Reason: tt.reason})
			for list, print := range map[string]func(){
				"saga list":   func() { printSagas(&out, []saga.Summary{s}) },
				"outbox list": func() { itemTable(cmd, []outbox.Item{{ID: 1, LastError: tt.reason}}) },
				"parked list": func() { _ = printParkedGroups(cmd, groups.list(), nil, &parkedFilter{}, false) },
			} {
				out.Reset()
				print()
				lines := strings.Split(out.String(), "\n")
				if end := lines[3:]; len(lines) < 4 || strings.TrimSpace(strings.Split(end[0], "backstep parked show")[0]) != "" || !strings.Contains(lines[2], tt.shows) {
					t.Errorf("%s, want the reason as %q on one line:\n%.3000s", list, tt.shows, out.String())
				}
				for _, line := range lines {
					if n := text.StringWidth(line); n > 200 || strings.ContainsAny(line, "\x1b\x00\a\r\u202e") {
						t.Errorf("%s has a line of %d columns: %.300q", list, n, line)
					}
				}
			}
			out.Reset()
			shown{Detail: saga.Detail{Summary: s}}.print(&out)
			if !strings.Contains(out.String(), printable(tt.reason)) {
				t.Errorf("saga show has not all of it:\n%.3000s", out.String())
			}
			out.Reset()
			var back []saga.Summary
			if err := errors.Join(printJSON(&out, []saga.Summary{s}), json.Unmarshal(out.Bytes(), &back)); err != nil {
				t.Fatal(err)
			}
			if got := back[0].LastError; got != strings.ToValidUTF8(tt.reason, "\ufffd") && name != "no UTF-8" {
				t.Errorf("--json has %.300q", got)
			}
		})
	}
}

// TestOpenCallThatWasUndone does not look like one that somebody has to see to.
func TestOpenCallThatWasUndone(t *testing.T) {
	charge := saga.ExternalCall{Step: 1, Direction: saga.Execute, Status: "OPEN"}
	refund := func(step int, status string) saga.ExternalCall {
		return saga.ExternalCall{Step: step, Direction: saga.Compensate, Status: status}
	}
	for name, tt := range map[string]struct {
		calls []saga.ExternalCall
		want  string
	}{
		"not undone":        {[]saga.ExternalCall{charge}, "OPEN: it may have happened"},
		"undone":            {[]saga.ExternalCall{charge, refund(1, "DONE")}, "OPEN: if it happened, it has been undone"},
		"refused to undo":   {[]saga.ExternalCall{charge, refund(1, "REFUSED")}, "OPEN: it may have happened"},
		"undoing":           {[]saga.ExternalCall{refund(1, "OPEN")}, "OPEN: it may have happened"},
		"another is undone": {[]saga.ExternalCall{charge, refund(0, "DONE")}, "OPEN: it may have happened"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			shown{Detail: saga.Detail{Calls: tt.calls}}.printCalls(&out)
			if !strings.Contains(out.String(), tt.want) {
				t.Errorf("want %q in\n%s", tt.want, out.String())
			}
		})
	}
}
