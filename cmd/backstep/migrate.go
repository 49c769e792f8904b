package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/spf13/cobra"

	"backstep/migrations"
)

func newMigrateUp() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Apply the migrations the database lacks",
		Long: `Applies the migrations that the database in BACKSTEP_MYSQL_DSN lacks, in order. Any number of
instances may run it at once: they wait for each other. One that was killed is run again.`,
		Example: `  BACKSTEP_MYSQL_DSN='root:secret@tcp(127.0.0.1:3306)/backstep' backstep migrate up`,
		Args:    cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			return withDatabase(cmd, config.openForMigrations, func(ctx context.Context, _ config, db *sql.DB) error {
				applied, err := migrations.Up(ctx, db, nil)
				if err != nil {
					return fmt.Errorf("%w; cure the cause and run it again: every statement can run twice", err)
				}
				out := cmd.OutOrStdout()
				if asJSON {
					return printJSON(out, applied)
				}
				for _, m := range applied {
					fmt.Fprintln(out, "applied", m.Name)
				}
				if len(applied) == 0 {
					fmt.Fprintln(out, "nothing to do: the schema is up to date")
				}
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was applied as JSON")
	return cmd
}

func newMigrateStatus() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "List the migrations and whether the database has them",
		Example: `  backstep migrate status
  backstep migrate status --json | jq '.[] | select(.applied | not) | .name'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			return withDatabase(cmd, config.openDatabase, func(ctx context.Context, _ config, db *sql.DB) error {
				list, err := migrations.Status(ctx, db)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), list)
				}
				t := newTable("version", "name", "applied at (UTC)")
				missing := 0
				for _, m := range list {
					at := clock(m.AppliedAt)
					if !m.Applied {
						missing++
						at = "missing"
					}
					t.AppendRow([]any{m.Version, m.Name, at})
				}
				render(cmd.OutOrStdout(), t)
				if missing > 0 {
					fmt.Fprintf(cmd.OutOrStdout(), "\n%s missing; run: backstep migrate up\n", plural(missing, "migration"))
				}
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}
