package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
)

func newOutboxStats() *cobra.Command {
	var w watchFlags
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Count what waits in the outbox, and how fast it is published",
		Long: `Shows what is pending, parked and scheduled, and rows published per second in the last minute (or
since the last 10,000 rows, if that is less), in all, by shard and by destination. It reads no
row that was published before that: how many of these there are is the server's estimate.`,
		Example: `  backstep outbox stats
  backstep outbox stats --watch --interval 5s
  backstep outbox stats --json | jq .oldest_pending_seconds`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if err := w.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				return w.run(ctx, func(ctx context.Context) error {
					st, err := outbox.LookAt(ctx, db)
					if err != nil {
						return err
					}
					return w.print(cmd.OutOrStdout(), st, func(out io.Writer) { printStats(out, st) })
				})
			})
		}),
	}
	w.add(cmd)
	return cmd
}

func printStats(out io.Writer, st outbox.Stats) {
	w := columns(out)
	field := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	and := func(format, age string) string {
		if age == "" {
			return ""
		}
		return fmt.Sprintf(format, age)
	}
	field("at", "%s UTC", clock(st.At))
	field("pending", "%d%s", st.Pending, and(", the oldest for %s", age(st.Oldest)))
	parked := ""
	if st.Parked > 0 {
		parked = "; backstep outbox list --status PARKED says why"
	}
	field("parked", "%d%s", st.Parked, parked)
	field("scheduled", "%d, %d of them due%s", st.Scheduled, st.Due, and(", the oldest for %s", age(st.OldestDue)))
	if st.PublishedEstimate >= 0 {
		field("published", "about %d are kept, as the server estimates", st.PublishedEstimate)
	}
	field("rate", "%.1f/s published, over the last %s", st.Rate, age(st.RateOver))
	_ = w.Flush() // as for all that is printed: nobody is left to tell

	fmt.Fprintln(out)
	shards := newTable("shard", "pending", "oldest", "parked", "published/s", "relay")
	for _, s := range st.Shards {
		owner := s.Owner
		if owner == "" {
			owner = "none"
		}
		shards.AppendRow([]any{s.Shard, s.Pending, age(s.Oldest), s.Parked, fmt.Sprintf("%.1f", s.Rate), owner})
	}
	render(out, shards)
	printDestinations(out, st)
}

// shownDestinations is how many a person wants to read of.
const shownDestinations = 20

func printDestinations(out io.Writer, st outbox.Stats) {
	if len(st.Destinations) == 0 {
		return
	}
	fmt.Fprintln(out)
	t := newTable("exchange", "routing key", "pending", "oldest", "parked", "published/s")
	for _, d := range st.Destinations[:min(len(st.Destinations), shownDestinations)] {
		t.AppendRow([]any{printable(d.Exchange), printable(d.RoutingKey), d.Pending, age(d.Oldest), d.Parked, fmt.Sprintf("%.1f", d.Rate)})
	}
	render(out, t)
	if n := len(st.Destinations) - shownDestinations; n > 0 {
		fmt.Fprintf(out, "and %s more; --json has all\n", plural(n, "destination"))
	}
	if st.Partial {
		fmt.Fprintln(out, "By destination only the oldest 100,000 pending and parked rows are counted.")
	}
}
