package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"backstep/internal/saga"
)

func newSagaVersions() *cobra.Command {
	var w watchFlags
	cmd := &cobra.Command{
		Use:   "versions",
		Short: "Count live sagas by the version of their definition",
		Long: `Counts the sagas that have not ended, by type, version and status. A saga stays on the version it
started with. A version that this binary does not know is another release's: workers that do not
know it leave its commands to those that do, and after 15 minutes park them. One that has no live
sagas can be taken out of the workers.`,
		Example: `  backstep saga versions
  backstep saga versions --watch       # until the old one has none
  backstep saga versions --json | jq '.[] | select(.known | not)'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if err := w.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				return w.run(ctx, func(ctx context.Context) error {
					list, err := sagas().Versions(ctx, db)
					if err != nil {
						return err
					}
					return w.print(cmd.OutOrStdout(), list, func(out io.Writer) { printVersions(out, list) })
				})
			})
		}),
	}
	w.add(cmd)
	return cmd
}

func printVersions(out io.Writer, list []saga.Version) {
	t := newTable("type", "version", "running", "compensating", "manual action", "oldest (UTC)", "")
	unknown := 0
	for i := range list {
		v := &list[i]
		note := ""
		switch n := v.Count(); {
		case !v.Known:
			note, unknown = "this binary does not know it", unknown+n
		case n == 0:
			note = "no live sagas"
		}
		t.AppendRow([]any{printable(v.Type), v.Version, v.Live[saga.Running], v.Live[saga.Compensating], v.Live[saga.ManualAction], clock(v.Oldest), note})
	}
	render(out, t)
	if unknown > 0 {
		fmt.Fprintf(out, "%s of versions that this binary does not know: keep workers that do until they have ended\n", plural(unknown, "saga"))
	}
}
