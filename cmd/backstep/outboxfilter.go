package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// rowFilter are the flags that choose rows.
type rowFilter struct {
	outbox.Filter
	since, before moment
}

func (f *rowFilter) add(cmd *cobra.Command, before, beforeUsage string) {
	cmd.Flags().StringVar(&f.Type, "type", "", "only those of this type, such as order.confirmed")
	cmd.Flags().StringVar(&f.Key, "key", "", "only those with this ordering key, such as a saga's id")
	cmd.Flags().StringVar(&f.Queue, "queue", "", "only commands to this queue")
	cmd.Flags().StringVar(&f.RoutingKey, "routing-key", "", "only those with this routing key, whatever the exchange")
	cmd.Flags().Var(&f.since, "since", "only those from then on: 2h ago, or 2026-11-29T14:05:00Z")
	cmd.Flags().Var(&f.before, before, beforeUsage)
}

// given reports whether any flag was: all rows is not what somebody means who says nothing.
func (f *rowFilter) given() bool {
	return f.Filter != outbox.Filter{} || f.since.given || f.before.given
}

// resolve makes times of the ages, by the database's clock.
func (f *rowFilter) resolve(ctx context.Context, q sqltx.Querier) (now time.Time, err error) {
	if now, err = outbox.Now(ctx, q); err != nil {
		return now, err
	}
	f.Since, f.Before = f.since.before(now), f.before.before(now)
	return now, nil
}

// moment is a flag for a time: how long ago, or when.
type moment struct {
	given bool
	ago   time.Duration
	at    time.Time
}

// Set reads 90m, 2026-11-29T14:05:00Z, or 2026-11-29 14:05:00, which is UTC as all we print.
func (m *moment) Set(text string) error {
	*m = moment{given: true}
	if d, err := time.ParseDuration(text); err == nil {
		if d < 0 {
			return fmt.Errorf("it must be positive")
		}
		m.ago = d
		return nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime} {
		if t, err := time.Parse(layout, text); err == nil {
			m.at = t.UTC()
			return nil
		}
	}
	return fmt.Errorf("it is neither an age such as 90m nor a time such as 2026-11-29T14:05:00Z")
}

func (m *moment) String() string {
	switch {
	case !m.given:
		return ""
	case m.at.IsZero():
		return m.ago.String()
	}
	return m.at.Format(time.RFC3339Nano)
}

// Type names the flag's values in usage texts.
func (m *moment) Type() string { return "time" }

// before returns the time, the zero time if none was given.
func (m *moment) before(now time.Time) time.Time {
	if m.given && m.at.IsZero() {
		return now.Add(-m.ago)
	}
	return m.at
}
