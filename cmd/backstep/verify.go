package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

func newVerify() *cobra.Command {
	var asJSON bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check every invariant; exit 1 and a table of what is wrong",
		Long: `Checks, on the database in BACKSTEP_MYSQL_DSN and the broker in BACKSTEP_AMQP_URL, at a moment of
rest: stock is conserved; confirmed orders are charged once and shipped; cancelled ones hold
nothing; every saga has ended; outbox and queues are empty; each message that was published to a
queue of ours, within BACKSTEP_INBOX_RETENTION, was processed or parked, or counts no more: somebody,
or a deadline, has moved its saga past it. What is parked, and sagas that need somebody, are shown and are no
violation.`,
		Example: `  backstep verify
  backstep verify --wait 30s          # first wait until nothing is in flight
  backstep verify --json | jq .violations`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c, err := loadConfig(needsMySQL, needsAMQP)
			if err != nil {
				return err
			}
			began := time.Now()
			say := func(err error) { fmt.Fprintln(cmd.ErrOrStderr(), "backstep:", err) }
			db, err := c.awaitSchema(ctx, began.Add(wait), say)
			if err != nil {
				return err
			}
			defer db.Close() //nolint:errcheck // the process ends
			b, err := c.dial(ctx, max(wait-time.Since(began), connectTimeout), wait == 0)
			if err != nil {
				return err
			}
			defer b.close()
			v := verifier{db: db, broker: b, retention: c.Inbox.Retention}
			if wait > 0 {
				if err := v.awaitSince(ctx, began, wait); err != nil {
					say(err)
				}
			}
			f, err := v.verify(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), f)
			} else {
				f.print(cmd.OutOrStdout())
			}
			if !f.OK && wait == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "backstep: what is still on its way counts as a violation; wait for it first: backstep verify --wait 1m")
			}
			if err == nil && !f.OK {
				err = errReported
			}
			return err
		}),
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "first wait so long at most until the servers answer and nothing is in flight")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was found as JSON")
	return cmd
}
