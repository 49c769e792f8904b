package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
)

// relayList is what outbox relays prints.
type relayList struct {
	Relays []relayLine         `json:"relays"`
	Free   []outbox.ShardState `json:"shards_without_relay"`
}

// relayLine adds to a relay how long ago its heartbeat was, by the database's clock.
type relayLine struct {
	outbox.RelayState
	HeartbeatAge *float64 `json:"heartbeat_age_seconds,omitempty"`
}

const howLeasesAreJudged = "Relays judge each other by their counters and no clock: one whose heartbeats stand still for the\n" +
	"lease's time (5s unless BACKSTEP_RELAY_LEASE_TTL says else) loses its shards to the others. The\n" +
	"times above are the database's; nobody decides by them."

func newOutboxRelays() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "relays",
		Short: "Show the relays, and which shards of the outbox each owns until when",
		Example: `  backstep outbox relays
  backstep outbox relays --json | jq '.shards_without_relay | length'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				relays, free, err := outbox.Relays(ctx, db)
				if err != nil {
					return err
				}
				l := relayList{Relays: []relayLine{}, Free: append([]outbox.ShardState{}, free...)}
				for _, r := range relays {
					line := relayLine{RelayState: r}
					if !r.HeartbeatAt.IsZero() {
						s := r.Silent.Seconds()
						line.HeartbeatAge = &s
					}
					l.Relays = append(l.Relays, line)
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), l)
				}
				l.print(cmd.OutOrStdout())
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	return cmd
}

func (l relayList) print(out io.Writer) {
	if len(l.Relays) > 0 {
		relays := newTable("relay", "host", "process", "up for", "last heartbeat", "shards")
		shards := newTable("shard", "relay", "epoch", "lease good for")
		for _, r := range l.Relays {
			process, up, heartbeat := "", "", "none: it is gone"
			if r.PID > 0 {
				process = strconv.Itoa(r.PID)
			}
			if !r.HeartbeatAt.IsZero() {
				up, heartbeat = short(r.Uptime), short(r.Silent)+" ago"
			}
			relays.AppendRow([]any{r.ID, r.Host, process, up, heartbeat, ranges(r.Shards)})
			for _, s := range r.Shards {
				shards.AppendRow([]any{s.Shard, r.ID, s.Epoch, leaseText(s)})
			}
		}
		render(out, relays)
		fmt.Fprintln(out)
		render(out, shards)
		fmt.Fprintln(out)
	}
	if len(l.Free) > 0 {
		fmt.Fprintf(out, "No relay owns %s (%s): nothing is published there. Start a relay, or look at its log.\n",
			plural(len(l.Free), "shard"), ranges(l.Free))
	}
	if len(l.Relays) > 0 {
		fmt.Fprintln(out, howLeasesAreJudged)
	}
}

// leaseText is for how long its owner has said that it keeps a shard.
func leaseText(s outbox.ShardState) string {
	text := ""
	switch {
	case s.LeasedUntil.IsZero():
		text = "not said"
	case s.Left < 0:
		text = "ended " + short(-s.Left) + " ago"
	default:
		text = short(s.Left)
	}
	if s.Recalled {
		text += ", is to be handed over"
	}
	return text
}

// ranges writes shards as 0-3, 7.
func ranges(shards []outbox.ShardState) string {
	var parts []string
	for i := 0; i < len(shards); {
		j := i
		for j+1 < len(shards) && shards[j+1].Shard == shards[j].Shard+1 {
			j++
		}
		part := strconv.Itoa(shards[i].Shard)
		if j > i {
			part += "-" + strconv.Itoa(shards[j].Shard)
		}
		parts = append(parts, part)
		i = j + 1
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// age is seconds as a person reads them; "" for none.
func age(seconds float64) string {
	if seconds <= 0 {
		return ""
	}
	return short(time.Duration(seconds * float64(time.Second)))
}
