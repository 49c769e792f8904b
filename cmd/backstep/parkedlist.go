package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/inbox"
)

func newParkedList() *cobra.Command {
	var f parkedFilter
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Count parked messages by queue and reason",
		Long: `Looks through the queues <queue>.parked and counts what is there by queue and reason; ids, quoted texts
and numbers in a reason do not make a group of its own. Nothing is removed: each message is put
back, in its order (but see --max). Until it is, other consumers of these queues, such as the management UI, do not
see it. Times are UTC.`,
		Example: `  backstep parked list
  backstep parked list --queue payment --since 2h
  backstep parked list --because 'unknown message type' --json | jq -r '.groups[].example'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("list takes no arguments, such as %q; --id chooses one message", args[0])
			}
			return nil
		},
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			if limit < 1 || limit > maxLook {
				return usagef("--max is %d; it may be 1 to %d", limit, maxLook)
			}
			if err := f.resolve(time.Now()); err != nil {
				return err
			}
			c, err := loadConfig(needsAMQP)
			if err != nil {
				return err
			}
			return c.withLot(cmd, nil, func(_ context.Context, l *parkedLot) error {
				var groups parkedGroups
				looks, err := l.walk(cmd, f.queues(), limit, "messages looked at", func(p *inbox.Parked) (bool, error) {
					if f.chooses(p) {
						groups.add(p)
					}
					return false, nil
				})
				if err != nil && (!errors.Is(err, amqp.ErrMissing) || len(looks) == 0) {
					return err
				}
				return errors.Join(printParkedGroups(cmd, groups.list(), looks, &f, asJSON), err)
			})
		}),
	}
	f.add(cmd)
	cmd.Flags().IntVar(&limit, "max", maxLook, "so many messages of each queue are looked at, the first ones; they come last then, if there are more")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	return cmd
}

func printParkedGroups(cmd *cobra.Command, groups []*parkedGroup, looks []look, f *parkedFilter, asJSON bool) error {
	missing := sayWhatIsMissing(cmd, looks)
	if len(groups) == 0 && len(f.ids) == 0 {
		if err := f.matchesNothing(); err != nil { // for a list that is an answer
			fmt.Fprintln(cmd.ErrOrStderr(), err)
		}
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), struct {
			Groups []*parkedGroup `json:"groups"`
			Looks  []look         `json:"queues"`
			More   bool           `json:"more"` // than were seen
		}{groups, looks, missing})
	}
	if len(groups) == 0 {
		such := ""
		if f.given() {
			such = "such "
		}
		fmt.Fprintf(cmd.OutOrStdout(), "no %smessages are parked\n", such)
		return nil
	}
	t := newTable("queue", "messages", "reason", "type", "oldest", "newest", "for example")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("type", 30), wrapAt("for example", 40)})
	total := 0
	for _, g := range groups {
		total += g.Count
		types := strings.Join(g.Types, ", ")
		if len(g.Types) == maxGroupTypes {
			types += ", …"
		}
		t.AppendRow([]any{printable(g.Queue), g.Count, reasonCell(g.words()), printable(types), clock(g.Oldest), clock(g.Newest), printable(g.Example)})
	}
	render(cmd.OutOrStdout(), t)
	fmt.Fprintf(cmd.OutOrStdout(), "\n%s; backstep parked show ID says more of one\n", plural(total, "message"))
	return nil
}
