package main

import (
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

func TestRowAdvice(t *testing.T) {
	row := func(s outbox.Status, change func(*outbox.Detail)) *outbox.Detail {
		d := &outbox.Detail{Item: outbox.Item{ID: 7, Status: s, Key: "it's", Exchange: message.CommandsExchange, PublishedAt: time.Unix(0, 0)}, Owner: "r1", Silent: time.Second}
		change(d)
		return d
	}
	tests := []struct {
		name string
		d    *outbox.Detail
		want []string
	}{
		{"published", row(outbox.StatusPublished, func(*outbox.Detail) {}), []string{`republish --key 'it'\''s' --since 1970-01-01T00:00:00Z --until 1970-01-01T00:00:00.000001Z`}},
		{"parked", row(outbox.StatusParked, func(*outbox.Detail) {}), []string{"written it off", "requeue 7", "drop 7"}},
		{"requeued, and parked again", row(outbox.StatusParked, func(d *outbox.Detail) { d.Actions = []outbox.Action{{Action: "withdraw"}, {Action: "requeue"}} }), []string{"written it off"}},
		{"withdrawn", row(outbox.StatusParked, func(d *outbox.Detail) { d.Actions = []outbox.Action{{Action: "withdraw"}} }), []string{"Somebody began to drop it", "drop 7", "requeue 7"}},
		{"no relay", row(outbox.StatusPending, func(d *outbox.Detail) { d.Owner = "" }), []string{"none owns shard 0", "drop 7"}},
		{"relay gone", row(outbox.StatusPending, func(d *outbox.Detail) { d.Silent = -1 }), []string{"r1 owns its shard, but is gone"}},
		{"behind another", row(outbox.StatusPending, func(d *outbox.Detail) { d.Ahead = &outbox.Item{ID: 5} }), []string{"goes first: backstep outbox show 5"}},
		{"refused", row(outbox.StatusPending, func(d *outbox.Detail) { d.Attempts, d.LastError, d.Held = 1, "NO_ROUTE", &d.Item }), []string{"refused it once", "NO_ROUTE", "topology apply"}},
		{"behind a refused one", row(outbox.StatusPending, func(d *outbox.Detail) { d.Held = &outbox.Item{ID: 5, Attempts: 2, LastError: "NO_ROUTE"} }), []string{"refused row 5, which goes there too (2 times)", "NO_ROUTE"}},
		{"nothing known", row(outbox.StatusPending, func(*outbox.Detail) {}), []string{"last heartbeat was 1s ago", "Nothing in the database holds it up"}},
		{"a saga's", row(outbox.StatusPending, func(d *outbox.Detail) { d.Message.Headers = message.Headers{message.HeaderSagaID: "s-1"} }), []string{"backstep saga show s-1"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := strings.Join(rowAdvice(tt.d), "\n")
			for _, want := range tt.want {
				if !strings.Contains(got, want) {
					t.Errorf("advice %q, want %q", got, want)
				}
			}
		})
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"山田 😀\nfine": "山田 😀\nfine",
		"\x1b[31m":   `\x1b[31m`,
		"a\xffb":     `a\xffb`,
		"a\ufffdb":   "a\ufffdb",
		"\u009b\r":   `\u009b\r`,
		"bell\a'":    `bell\a'`,
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestMoment(t *testing.T) {
	now := time.Date(2026, 11, 29, 14, 0, 0, 0, time.UTC)
	for in, want := range map[string]string{
		"90m":                       "2026-11-29 12:30:00",
		"0s":                        "2026-11-29 14:00:00",
		"2026-11-29T14:05:00Z":      "2026-11-29 14:05:00",
		"2026-11-29T14:05:00+02:00": "2026-11-29 12:05:00",
		"2026-11-29 14:05:00":       "2026-11-29 14:05:00",
	} {
		var m moment
		if err := m.Set(in); err != nil || m.before(now).Format(time.DateTime) != want || m.String() == "" {
			t.Errorf("%s is %s, %v, want %s", in, m.before(now), err, want)
		}
	}
	var m moment
	if !m.before(now).IsZero() || m.String() != "" {
		t.Error("no time is a time")
	}
	for _, in := range []string{"", "yesterday", "-1h", "2026-11-29"} {
		if err := m.Set(in); err == nil {
			t.Errorf("%q is taken", in)
		}
	}
}

func TestRanges(t *testing.T) {
	for want, shards := range map[string][]int{"none": nil, "3": {3}, "0-2": {0, 1, 2}, "0, 2-3, 15": {0, 2, 3, 15}} {
		var states []outbox.ShardState
		for _, s := range shards {
			states = append(states, outbox.ShardState{Shard: s})
		}
		if got := ranges(states); got != want {
			t.Errorf("ranges(%v) = %s, want %s", shards, got, want)
		}
	}
}
