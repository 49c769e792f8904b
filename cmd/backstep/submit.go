package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
)

// submitOptions are the flags of submit.
type submitOptions struct {
	mix
	seed     uint64
	skus     int
	stock    int64
	patience time.Duration
	asJSON   bool
}

func newSubmit() *cobra.Command {
	var o submitOptions
	cmd := &cobra.Command{
		Use:   "submit [FILE]",
		Short: "Submit orders from JSON Lines, or generated ones",
		Long: `Publishes order.create messages to the queue "orders" of the broker in BACKSTEP_AMQP_URL and
waits until the broker has taken responsibility for each. FILE has one JSON object a line, "-" is
standard input; what goes into it is in docs/messages.md. If a line is not JSON nothing is
submitted. With --count orders are generated instead: the same numbers, --seed and --skus give
the same orders.

It prints the message id of each confirmed order; that is also the order's request id, by which
backstep saga show and cancel find its saga. Who cancels by a message (saga.cancel) needs the id
of the saga or the order, which are made later: the event order.created has both beside the
request_id. It exits with 1 if any was not confirmed, and names the lines.`,
		Example: `  backstep submit orders.jsonl
  jq -c '.orders[]' export.json | backstep submit - --json
  backstep submit --count 200 --no-stock 13 --decline 13 --refuse 14 --stock 1000000`,
		Args: cobra.MaximumNArgs(1),
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			orders, err := o.orders(cmd, args)
			if err != nil {
				return err
			}
			return o.run(cmd, orders)
		}),
	}
	f := cmd.Flags()
	f.IntVar(&o.count, "count", 0, "generate so many orders instead of reading them")
	f.IntVar(&o.noStock, "no-stock", 0, "so many of them ask for more than any stock")
	f.IntVar(&o.decline, "decline", 0, "so many of them have a payment that is declined")
	f.IntVar(&o.refuse, "refuse", 0, "so many of them go where no carrier goes")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the generated orders")
	f.IntVar(&o.skus, "skus", 20, "generated orders are over SKU-0001 to this many")
	f.Int64Var(&o.stock, "stock", 0, "before, stock each of these SKUs that does not exist with so many (needs BACKSTEP_MYSQL_DSN)")
	f.DurationVar(&o.patience, "patience", 30*time.Second, "give up when there is no connection, or nothing was confirmed, for so long")
	f.BoolVar(&o.asJSON, "json", false, "print one JSON object a line for each order, confirmed or not")
	return cmd
}

// orders reads or generates them.
func (o *submitOptions) orders(cmd *cobra.Command, args []string) ([]order, error) {
	switch {
	case len(args) == 1 && cmd.Flags().Changed("count"):
		return nil, usagef("submit reads FILE or generates --count orders, not both")
	case o.skus < 1 || o.skus > 9999:
		return nil, usagef("--skus is %d; it may be 1 to 9999", o.skus)
	case o.stock < 0 || o.stock >= moreThanAnyStock:
		return nil, usagef("--stock is %d; it may be 0 to %d", o.stock, moreThanAnyStock-1)
	case o.patience <= 0:
		return nil, usagef("--patience is %s; it must be positive", o.patience)
	case cmd.Flags().Changed("count"):
		if err := o.validate(); err != nil {
			return nil, err
		}
		return generate(o.mix, o.seed, o.skus), nil
	case len(args) == 0:
		return nil, usagef(`submit needs FILE ("-" is standard input) or --count; see backstep submit --help`)
	case o.mix != mix{}:
		return nil, usagef("--no-stock, --decline and --refuse go with --count")
	}
	in, name := cmd.InOrStdin(), "standard input"
	if args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return nil, fmt.Errorf("read orders: %w", err)
		}
		defer f.Close() //nolint:errcheck // it was only read
		in, name = f, args[0]
	}
	orders, err := readLines(in)
	if err != nil {
		return nil, fmt.Errorf("%s: nothing was submitted:\n%w", name, err)
	}
	return orders, nil
}

func (o *submitOptions) run(cmd *cobra.Command, orders []order) error {
	ctx := cmd.Context()
	needs := []string{needsAMQP}
	if o.stock > 0 {
		needs = append(needs, needsMySQL)
	}
	c, err := loadConfig(needs...)
	if err != nil {
		return err
	}
	if o.stock > 0 {
		if err := o.seedStock(ctx, c); err != nil {
			return err
		}
	}
	b, err := c.dial(ctx, o.patience, true)
	if err != nil {
		return err
	}
	defer b.close()
	bar := newProgress(cmd.ErrOrStderr(), len(orders), "orders confirmed")
	if isTerminal(cmd.OutOrStdout()) {
		bar = newProgress(io.Discard, len(orders), "") // the ids are progress enough
	}
	emit := printer(cmd.OutOrStdout(), o.asJSON)
	began := time.Now()
	confirmed := 0
	var failed []error
	s := submitter{broker: b, patience: o.patience, settled: func(o *order) {
		if o.Confirmed {
			confirmed++
			bar.set(confirmed)
		} else {
			failed = append(failed, fmt.Errorf("line %d was not confirmed (message id %q): %s", o.Line, o.MessageID, o.Reason))
		}
		failed = append(failed, emit(o)...)
	}}
	s.submit(ctx, orders)
	bar.done()
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d orders were not confirmed\n%w", len(orders)-confirmed, len(orders), errors.Join(limit(failed)...))
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s submitted and confirmed in %s\n", plural(confirmed, "order"), short(time.Since(began)))
	return nil
}

func (o *submitOptions) seedStock(ctx context.Context, c config) error {
	db, err := c.openSchema(ctx)
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // one statement, and it has been committed
	return handlers.Seed(ctx, db, o.skus, o.stock)
}

// printer returns what prints one order, and the errors of that.
func printer(out io.Writer, asJSON bool) func(*order) []error {
	enc := json.NewEncoder(out)
	return func(o *order) []error {
		var err error
		if asJSON {
			err = enc.Encode(o)
		} else if o.Confirmed {
			_, err = fmt.Fprintln(out, o.MessageID)
		}
		if err != nil {
			return []error{fmt.Errorf("print line %d: %w", o.Line, err)}
		}
		return nil
	}
}

// limit cuts errors to as many as somebody reads.
func limit(errs []error) []error {
	if len(errs) > maxFaults {
		return append(errs[:maxFaults:maxFaults], fmt.Errorf("and %d more; --json names them all", len(errs)-maxFaults))
	}
	return errs
}
