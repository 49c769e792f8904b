package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// watchFlags are those of a verb that can look again and again.
type watchFlags struct {
	watch    bool
	interval time.Duration
	asJSON   bool

	flags *pflag.FlagSet
}

func (w *watchFlags) add(cmd *cobra.Command) {
	w.flags = cmd.Flags()
	cmd.Flags().BoolVar(&w.watch, "watch", false, "look again and again, until Ctrl-C")
	cmd.Flags().DurationVar(&w.interval, "interval", 2*time.Second, "from one look to the next, with --watch")
	cmd.Flags().BoolVar(&w.asJSON, "json", false, "print it as JSON; with --watch, one line for each look")
}

func (w *watchFlags) check() error {
	switch {
	case w.interval <= 0:
		return usagef("--interval is %s; it must be positive", w.interval)
	case !w.watch && w.flags.Changed("interval"):
		return usagef("--interval is for --watch, which is not given")
	}
	return nil
}

// run looks once, or until ctx ends: that is how watching ends.
func (w *watchFlags) run(ctx context.Context, look func(ctx context.Context) error) error {
	for {
		err := look(ctx)
		switch {
		case w.watch && ctx.Err() != nil:
			return nil
		case err != nil || !w.watch:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(w.interval):
		}
	}
}

// print prints v as JSON if that is wanted, else as text does; a terminal gets a new screen for
// each look.
func (w *watchFlags) print(out io.Writer, v any, text func(io.Writer)) error {
	switch {
	case w.asJSON && w.watch:
		enc := json.NewEncoder(out)
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	case w.asJSON:
		return printJSON(out, v)
	case w.watch && isTerminal(out):
		fmt.Fprint(out, "\033[H\033[2J")
	}
	text(out)
	return nil
}
