package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
)

// parkedFilter are the flags that choose parked messages. Those of several flags must fit all.
type parkedFilter struct {
	queueNames []string
	ids        []string
	because    string
	typ        string
	since      moment
	until      moment

	from, to time.Time // resolved
}

func (f *parkedFilter) add(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.queueNames, "queue", nil, "only those parked from these queues")
	cmd.Flags().StringVar(&f.because, "because", "", "only those with this text in the reason, as it is or as list shows it, in upper or lower case")
	cmd.Flags().StringVar(&f.typ, "type", "", "only those of this type, such as order.create")
	cmd.Flags().StringSliceVar(&f.ids, "id", nil, "only those with these message ids")
	cmd.Flags().Var(&f.since, "since", "only those parked from then on: 2h ago, or 2026-11-29T14:05:00Z")
	cmd.Flags().Var(&f.until, "until", "only those parked before: 10m ago, or 2026-11-29T14:05:00Z")
}

// given reports whether any flag was: all messages is not what somebody means who says nothing.
func (f *parkedFilter) given() bool {
	return len(f.queueNames)+len(f.ids) > 0 || f.because != "" || f.typ != "" || f.since.given || f.until.given
}

// check demands names of queues that there can be.
func (f *parkedFilter) check() error {
	for _, q := range f.queues() {
		if !slices.Contains(handlers.Queues, q) {
			return usagef("--queue %q is no queue of Backstep; they are %s", q, strings.Join(handlers.Queues, ", "))
		}
	}
	return nil
}

// matchesNothing is the error of a filter that no message fits. That queues are empty is none:
// their names are right.
func (f *parkedFilter) matchesNothing() error {
	var given []string
	for _, flag := range [][2]string{{"--because", f.because}, {"--type", f.typ}, {"--since", f.since.String()}, {"--until", f.until.String()}} {
		if flag[1] != "" {
			given = append(given, flag[0]+" "+quote(flag[1]))
		}
	}
	if len(given) == 0 {
		return nil
	}
	if len(f.queueNames) > 0 {
		given = append(given, "--queue "+quote(strings.Join(f.queues(), ",")))
	}
	return fmt.Errorf("no parked message matches %s; backstep parked list shows reasons", strings.Join(given, " "))
}

// fitsReason reports whether the reason has the text, as it is or as list shows it of many.
func (f *parkedFilter) fitsReason(reason string) bool {
	text := strings.ToLower(f.because)
	return strings.Contains(strings.ToLower(reason), text) || strings.Contains(strings.ToLower(alike(reason)), text)
}

// resolve makes times of the ages.
func (f *parkedFilter) resolve(now time.Time) error {
	f.from, f.to = f.since.before(now), f.until.before(now)
	if !f.to.IsZero() && f.to.Before(f.from) {
		return usagef("--until %s UTC is before --since %s UTC", clock(f.to), clock(f.from))
	}
	return nil
}

// queues returns those to look at. The name of a parked queue will do too.
func (f *parkedFilter) queues() []string {
	if len(f.queueNames) == 0 {
		return handlers.Queues
	}
	var list []string
	for _, q := range f.queueNames {
		q = strings.TrimSuffix(q, amqp.ParkedQueue(""))
		if !slices.Contains(list, q) {
			list = append(list, q)
		}
	}
	return list
}

// chooses reports whether a message fits the flags. One of which nobody knows when it was
// parked fits no time.
func (f *parkedFilter) chooses(p *inbox.Parked) bool {
	return (len(f.ids) == 0 || slices.Contains(f.ids, p.Name()) || slices.Contains(f.ids, p.Original.MessageID)) &&
		f.fitsReason(p.Reason) &&
		(f.typ == "" || p.Original.Type == f.typ) &&
		(!f.since.given || !p.At.IsZero() && !p.At.Before(f.from)) &&
		(!f.until.given || !p.At.IsZero() && p.At.Before(f.to))
}
