package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// sagaFate is what became of a saga that something was to be done to.
type sagaFate string

const (
	fateChanged  sagaFate = "done"
	fateAlready  sagaFate = "already"  // it was so
	fateMoved    sagaFate = "moved on" // meanwhile; the filter does not choose it any more
	fateNot      sagaFate = "refused"
	fateFailed   sagaFate = "failed"       // a hook of its definition did
	fateRelapsed sagaFate = "failed again" // it was done, and the saga has failed since
)

// failures are what --max-failures counts.
var failures = []sagaFate{fateNot, fateFailed, fateRelapsed}

// sagaOutcome is what became of one saga.
type sagaOutcome struct {
	ID     string       `json:"id"`
	Fate   sagaFate     `json:"fate"`
	Detail string       `json:"detail"`
	Effect *saga.Effect `json:"effect,omitempty"`
}

// sagaRun does a verb to sagas, one after the other.
type sagaRun struct {
	*sagaAction
	db     *sql.DB
	engine *saga.Engine
	op     saga.Operation

	results []sagaOutcome
	left    int // of the sagas that were chosen, when it stopped by itself
}

// do does it. Its error is of the database; a saga that cannot be done is none.
func (r *sagaRun) do(cmd *cobra.Command, ids []string) error {
	pace := rate.NewLimiter(rate.Limit(r.perSecond), 1)
	bar := newProgress(cmd.ErrOrStderr(), len(ids), "sagas "+r.done)
	defer bar.done()
	for i, id := range ids {
		err := pace.Wait(cmd.Context())
		if err == nil {
			err = r.lookBack(cmd.Context())
		}
		if err == nil && r.maxFailures > 0 && r.count(failures...) >= r.maxFailures {
			r.left = len(ids) - i
			return nil
		}
		if err == nil {
			err = r.one(cmd.Context(), id)
		}
		if err != nil {
			bar.done()
			fmt.Fprintf(cmd.ErrOrStderr(), "not finished: %d of %d sagas gone through; the same command goes on with the rest\n", i, len(ids))
			return err
		}
		bar.set(i + 1)
	}
	return nil
}

func (r *sagaRun) one(ctx context.Context, id string) error {
	eff, err := r.engine.Operate(ctx, r.db, id, r.op)
	refused, no := errors.AsType[*saga.RefusedError](err)
	failed, hook := errors.AsType[*saga.HookError](err)
	switch {
	case no:
		r.results = append(r.results, sagaOutcome{ID: id, Fate: fateNot, Detail: refused.Error()})
		return nil
	case hook && ctx.Err() == nil:
		r.results = append(r.results, sagaOutcome{ID: id, Fate: fateFailed, Detail: hookFailed(failed)})
		return nil
	case errors.Is(err, saga.ErrMovedOn):
		r.results = append(r.results, sagaOutcome{ID: id, Fate: fateMoved, Detail: "it is not any more what it was chosen for"})
		return nil
	case errors.Is(err, saga.ErrNotFound):
		r.results = append(r.results, sagaOutcome{ID: id, Fate: fateNot, Detail: "it is not there any more"})
		return nil
	case err != nil:
		return fmt.Errorf("%s saga %s: %w", r.verb, id, err)
	}
	res := sagaOutcome{ID: id, Fate: fateAlready, Detail: eff.Detail, Effect: &eff}
	if eff.Changed {
		res.Fate = fateChanged
	}
	r.results = append(r.results, res)
	return nil
}

// hookFailed says what somebody has to cure before the verb can be done.
func hookFailed(err *saga.HookError) string {
	return fmt.Sprintf("a hook of its definition fails: %v", err.Err)
}

// lookBack finds those of the last sagas that have failed since it was done.
func (r *sagaRun) lookBack(ctx context.Context) error {
	var ids []string
	byID := map[string]*sagaOutcome{}
	for i := max(0, len(r.results)-sqltx.MaxIn); i < len(r.results); i++ {
		if res := &r.results[i]; res.Fate == fateChanged && (res.Effect.Status == saga.Running || res.Effect.Status == saga.Compensating) {
			ids = append(ids, res.ID)
			byID[res.ID] = res
		}
	}
	now, err := saga.States(ctx, r.db, ids)
	if err != nil {
		return err
	}
	for id, is := range now {
		was := byID[id]
		again := was.Effect.State
		again.Attempt = is.Attempt
		if is.Status == saga.ManualAction || is == again && is.Attempt > was.Effect.Attempt {
			was.Fate = fateRelapsed
			was.Detail += "; since then it has failed: backstep saga show " + id
		}
	}
	return nil
}

func (r *sagaRun) count(fates ...sagaFate) (n int) {
	for i := range r.results {
		if slices.Contains(fates, r.results[i].Fate) {
			n++
		}
	}
	return n
}

// print says what became of the sagas. Its error is that not all were done.
func (r *sagaRun) print(cmd *cobra.Command, more bool) error {
	counts := map[sagaFate]int{}
	for i := range r.results {
		counts[r.results[i].Fate]++
	}
	if more {
		fmt.Fprintln(cmd.ErrOrStderr(), "there are more (--max); the same command goes on with them")
	}
	if r.asJSON {
		if err := printJSON(cmd.OutOrStdout(), struct {
			Counts map[sagaFate]int `json:"counts"`
			More   bool             `json:"more"`
			Left   int              `json:"left"` // when it stopped by itself
			Sagas  []sagaOutcome    `json:"sagas"`
		}{counts, more, r.left, append([]sagaOutcome{}, r.results...)}); err != nil {
			return err
		}
	} else {
		r.printText(cmd, counts)
	}
	switch n := r.count(failures...); {
	case r.left > 0:
		return errors.New(r.stopped(n))
	case n > 0:
		return fmt.Errorf("not %s, or failed since: %d of %s: %s", r.done, n, plural(len(r.results), "saga"), r.failures())
	}
	return nil
}

// stopped says why it stopped by itself, at so many failures.
func (r *sagaRun) stopped(n int) string {
	why, left := "", "is left as it is"
	if n > r.maxFailures { // several have failed again between one saga and the next
		why = "; it counts those that have failed since they were done"
	}
	if r.left > 1 {
		left = "are left as they are"
	}
	return fmt.Sprintf("stopped after %s (--max-failures %d%s); %s %s", plural(n, "failure"), r.maxFailures, why, plural(r.left, "saga"), left)
}

// failures names some of those that failed.
func (r *sagaRun) failures() string {
	const most = 5
	var ids []string
	for i := range r.results {
		if res := &r.results[i]; slices.Contains(failures, res.Fate) {
			ids = append(ids, res.ID)
		}
	}
	if n := len(ids) - most; n > 0 {
		ids = append(ids[:most], fmt.Sprintf("and %d more", n))
	}
	return strings.Join(ids, ", ")
}

// failuresFirst is the order in which a person wants to read of them.
var failuresFirst = []sagaFate{fateNot, fateFailed, fateRelapsed, fateMoved, fateAlready, fateChanged}

func (r *sagaRun) printText(cmd *cobra.Command, counts map[sagaFate]int) {
	out := cmd.OutOrStdout()
	words := map[sagaFate]string{fateNot: "left as it is", fateFailed: "left as it is", fateMoved: "left as it is", fateRelapsed: "failed since", fateAlready: "already so", fateChanged: r.done}
	slices.SortStableFunc(r.results, func(a, b sagaOutcome) int {
		return cmp.Compare(slices.Index(failuresFirst, a.Fate), slices.Index(failuresFirst, b.Fate))
	})
	printFirst(out, r.results, "saga", func(o *sagaOutcome) string {
		return fmt.Sprintf("saga %s: %s: %s", o.ID, words[o.Fate], printable(clipText(o.Detail, 600)))
	})
	fmt.Fprintf(out, "%s %s", plural(counts[fateChanged]+counts[fateRelapsed], "saga"), r.done)
	if n := counts[fateRelapsed]; n > 0 {
		fmt.Fprintf(out, ", of which %d failed since", n)
	}
	if n := counts[fateAlready]; n > 0 {
		fmt.Fprintf(out, ", %d already", n)
	}
	if n := counts[fateMoved]; n > 0 {
		fmt.Fprintf(out, ", %d had moved on", n)
	}
	if n := counts[fateNot] + counts[fateFailed]; n > 0 {
		fmt.Fprintf(out, ", %d not", n)
	}
	fmt.Fprintln(out)
	if r.verb == saga.VerbRetry && counts[fateChanged] > 0 {
		of := "ID"
		if len(r.results) == 1 {
			of = r.results[0].ID
		}
		fmt.Fprintf(out, "whether it helps is known when the step has run: backstep saga show %s\n", of)
	}
}
