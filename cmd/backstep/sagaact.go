package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"backstep/internal/saga"
)

// sagaVerb is a verb that changes sagas.
type sagaVerb struct {
	verb    saga.Verb
	done    string        // "retried"
	among   []saga.Status // those that a filter without --status means
	also    []saga.Status // others that there may be something to do to
	short   string
	long    string
	example string
}

const howSagasAreChosen = `

Sagas are named by id, by the id of the request that made their order, or chosen by the flags, all of which must fit;
without --status those that are %s are meant.
If none fits, that is said on standard error (--json: an empty list), and the exit code is 0, for nothing is left to do.
At most --rate are done a second, the one that waits longest first. It stops by itself when --max-failures could not
be done, or have failed again meanwhile; the same command then begins with those that could not, and --max-failures 0
passes them. What is so already counts as done and is not audited again.`

var sagaVerbs = []sagaVerb{
	{
		verb: saga.VerbRetry, done: "retried", among: saga.Live,
		short: "Try the step that sagas are at again, now",
		long: `What waits for its next attempt waits no longer. A saga in MANUAL_ACTION goes on: the step it is at, or the
compensation, is tried again, with all its attempts (those at a participant's step are not renewed), under a new
message id; a copy of the old message, should it still come, has no effect. Cure the cause first (backstep saga show
ID says it), or the saga is stopped again.`,
		example: `  backstep saga retry 0194f1a4-5c00-7000-8000-000000000001 --reason 'the gateway is back'
  backstep saga retry --status MANUAL_ACTION --error 'gateway away' --dry-run
  backstep saga retry --status MANUAL_ACTION --error 'gateway away' --rate 20 --reason 'the gateway is back'`,
	},
	{
		verb: saga.VerbSkip, done: "skipped", among: []saga.Status{saga.ManualAction}, also: []saga.Status{saga.Running, saga.Compensating},
		short: "Leave out the step that sagas are at",
		long: `The step named by --step counts as SKIPPED and the saga goes on behind it; should it be undone later, that
step is not. With --compensation it is the step's compensation that is left out, and what the step did stands. A
saga that is at the other of the two, by now, is left as it is. Nothing is done about what the step was to do: do
that by hand, or backstep verify may report it. A later step that needs the result of the one that is left out
fails: --dry-run shows it, if it comes next. --step says what to leave out and chooses no saga: name those by their
ids, or choose among those at the step by the other flags or --all.`,
		example: `  backstep saga skip 0194f1a4-5c00-7000-8000-000000000001 --step charge-payment --dry-run
  backstep saga skip 0194f1a4-5c00-7000-8000-000000000001 --step charge-payment --reason 'paid in cash'
  backstep saga skip 0194f1a4-5c00-7000-8000-000000000001 --step charge-payment --compensation --reason 'ticket 12'`,
	},
	{
		verb: saga.VerbCancel, done: "cancelled", among: []saga.Status{saga.Running, saga.ManualAction},
		short: "Undo sagas that have not passed their pivot",
		long: `The steps that have completed are compensated, the last one first. While a call to another system is being
made the cancel is recorded, and carried out when the call ends; one that has failed is not made again, and its step
is undone as if it had happened. Past its pivot a saga cannot be cancelled, and one that has completed is not: see
backstep saga compensate.`,
		example: `  backstep saga cancel 0194f1a4-5c00-7000-8000-000000000001 --reason 'the customer called'
  backstep saga cancel --step charge-payment --older 1h --dry-run`,
	},
	{
		verb: saga.VerbCompensate, done: "compensated", among: []saga.Status{saga.Running, saga.ManualAction}, also: []saga.Status{saga.Completed},
		short: "Undo sagas, also completed ones",
		long: `As backstep saga cancel, and besides it reverses sagas that have COMPLETED, if their definition has no pivot.
A filter chooses these only with --status COMPLETED.`,
		example: `  backstep saga compensate 0194f1a4-5c00-7000-8000-000000000001 --dry-run
  backstep saga compensate 0194f1a4-5c00-7000-8000-000000000001 --reason 'sent back, ticket 12'`,
	},
	{
		verb: saga.VerbResolve, done: "resolved", among: []saga.Status{saga.ManualAction},
		short: "End sagas in MANUAL_ACTION that have been put right by hand",
		long: `The saga becomes COMPLETED or COMPENSATED, as --as says, and no step is run. The definition may refuse it: an
order is CONFIRMED only if it is charged and shipped, and CANCELLED only if it is neither.`,
		example: `  backstep saga resolve 0194f1a4-5c00-7000-8000-000000000001 --as completed --reason 'shipped by hand'
  backstep saga resolve --as compensated --error 'cannot be refunded' --max 10 --reason 'refunded by the bank'`,
	},
}

// sagaAction is one call of such a verb.
type sagaAction struct {
	sagaVerb
	operatorFlags
	filter      sagaFilter
	all         bool
	undo        bool // skip: the compensation
	as          string
	limit       int // 0: none
	perSecond   int
	maxFailures int
}

func newSagaAction(v sagaVerb) *cobra.Command {
	a := &sagaAction{sagaVerb: v}
	cmd := &cobra.Command{
		Use:     string(v.verb) + " [ID...]",
		Short:   v.short,
		Long:    v.long + fmt.Sprintf(howSagasAreChosen, joinStatuses(v.among)),
		Example: v.example,
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			op, f, err := a.check(cmd, args)
			if err != nil {
				return err
			}
			a.filter.warn(cmd)
			return withSchema(cmd, func(ctx context.Context, c config, db *sql.DB) error {
				ids, more, err := a.choose(ctx, db, args, f)
				if err != nil {
					return err
				}
				if len(args) == 0 && len(ids) == 0 {
					fmt.Fprintln(cmd.ErrOrStderr(), a.matchesNothing(f))
				}
				if a.dryRun {
					return a.rehearse(cmd, c, db, ids, more, op)
				}
				r := sagaRun{sagaAction: a, db: db, engine: sagas(), op: op}
				err = r.do(cmd, ids)
				if r.count(fateChanged) > 0 {
					c.ring(cmd)
				}
				return errors.Join(err, r.print(cmd, more))
			})
		}),
	}
	a.filter.add(cmd, slices.DeleteFunc(slices.Clone(saga.Statuses), func(s saga.Status) bool { return !a.may(s) }))
	cmd.Flags().BoolVar(&a.all, "all", false, "all that are "+joinStatuses(v.among))
	if v.verb == saga.VerbResolve {
		cmd.Flags().StringVar(&a.as, "as", "", "what it is now: completed or compensated (needed)")
	}
	if v.verb == saga.VerbSkip {
		cmd.Flags().Lookup("step").Usage = "the step to leave out, such as charge-payment (needed; it chooses no saga by itself)"
		cmd.Flags().BoolVar(&a.undo, "compensation", false, "leave out the step's compensation, not its action")
	}
	cmd.Flags().IntVar(&a.limit, "max", 0, "so many at most, those that wait longest; 0 is all")
	cmd.Flags().IntVar(&a.perSecond, "rate", 10, "so many sagas a second at most")
	cmd.Flags().IntVar(&a.maxFailures, "max-failures", 3, "stop when so many failed; 0 is never")
	tries := "do it in a transaction that is rolled back, and say what it did"
	if v.verb != saga.VerbResolve {
		tries = "do it, and the step that comes next, in a transaction that is rolled back; call nobody"
	}
	a.add(cmd, tries)
	return cmd
}

// check demands what a verb needs, and makes of it what is to be done, and the filter.
func (a *sagaAction) check(cmd *cobra.Command, args []string) (op saga.Operation, f saga.Filter, err error) {
	chosen := a.filter
	if a.verb == saga.VerbSkip {
		chosen.step = "" // it says what to do
	}
	err = checkChoice(cmd, "sagas", len(args) > 0, chosen.given() || a.all)
	switch {
	case err != nil && len(args) == 0 && a.filter.step != chosen.step:
		err = usagef("skip needs ids, flags that choose sagas, or --all: --step names the step to leave out, and chooses no saga; see %s --help", cmd.CommandPath())
	case err != nil:
	case a.verb == saga.VerbSkip && a.filter.step == "":
		err = usagef("--step is needed: name the step to leave out, so that doing it twice does not leave out two")
	case a.verb == saga.VerbResolve && !slices.Contains([]string{"completed", "compensated"}, strings.ToLower(a.as)):
		err = usagef("--as %q: say completed or compensated", a.as)
	case a.maxFailures < 0:
		err = usagef("--max-failures is %d; it must be 0 or more", a.maxFailures)
	default:
		err = checkLimits(a.limit, a.perSecond)
	}
	if err == nil {
		err = a.operatorFlags.check()
	}
	if err == nil {
		f, err = a.filter.filter()
	}
	if err == nil && f.Status != "" && !a.may(f.Status) {
		err = usagef("--status %s: there is nothing to %s about those", f.Status, a.verb)
	}
	op = saga.Operation{Verb: a.verb, By: a.Operator, As: saga.Status(strings.ToUpper(a.as))}
	if a.verb == saga.VerbSkip {
		op.Step, op.Direction = a.filter.step, saga.Execute
		if a.undo {
			op.Direction = saga.Compensate
		}
		f.Direction = op.Direction
	}
	if len(args) == 0 { // they may have changed by the time it is their turn
		op.Still = &saga.Choice{Filter: f, Among: a.among}
	}
	return op, f, err
}

// matchesNothing says that the filter chooses no saga. That is no failure: the same command, once more, has nothing
// left to do.
func (a *sagaAction) matchesNothing(f saga.Filter) string {
	among := a.among
	if f.Status != "" {
		among = []saga.Status{f.Status}
	}
	fits := "fits these flags"
	if a.all && !a.filter.given() {
		fits = "is there"
	}
	return fmt.Sprintf("nothing matched: no saga that is %s %s; backstep saga list shows the sagas there are", strings.Join(strings.Split(joinStatuses(among), ", "), " or "), fits)
}

// may reports whether there is a saga with this status that the verb can do something to.
func (a *sagaAction) may(s saga.Status) bool {
	return slices.Contains(a.among, s) || slices.Contains(a.also, s)
}

// choose returns the ids of the sagas that are named, each once, or of those that the filter chooses,
// and whether there are more of these.
func (a *sagaAction) choose(ctx context.Context, db *sql.DB, names []string, f saga.Filter) (ids []string, more bool, err error) {
	if len(names) == 0 {
		return atMost(a.limit, func(n int) ([]string, error) {
			f.Limit = n
			return saga.Choose(ctx, db, f, a.among)
		})
	}
	var faults []error
	for _, name := range names {
		d, err := findSaga(ctx, db, name)
		if err != nil {
			faults = append(faults, err)
		} else if !slices.Contains(ids, d.ID) {
			ids = append(ids, d.ID)
		}
	}
	if a.limit > 0 && len(ids) > a.limit {
		return ids[:a.limit], true, errors.Join(faults...)
	}
	return ids, false, errors.Join(faults...)
}
