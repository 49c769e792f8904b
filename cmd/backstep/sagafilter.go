package main

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/saga"
)

// sagaFilter are the flags that choose sagas. Those of several flags must fit all.
type sagaFilter struct {
	typ    string
	status string
	step   string
	reason string
	older  time.Duration
}

// add adds the flags. Sagas with one of the statuses can be chosen.
func (f *sagaFilter) add(cmd *cobra.Command, statuses []saga.Status) {
	cmd.Flags().StringVar(&f.status, "status", "", "only those with this status: "+joinStatuses(statuses))
	cmd.Flags().StringVar(&f.typ, "type", "", "only those of this type, such as place-order")
	cmd.Flags().StringVar(&f.step, "step", "", "only those at this step, such as charge-payment")
	cmd.Flags().StringVar(&f.reason, "error", "", "only those with this text in the reason, in upper or lower case")
	cmd.Flags().DurationVar(&f.older, "older", 0, "only those unchanged for so long, such as 10m")
}

// given reports whether any flag was.
func (f *sagaFilter) given() bool { return *f != sagaFilter{} }

// filter is what the flags say.
func (f *sagaFilter) filter() (saga.Filter, error) {
	s := saga.Filter{Type: f.typ, Status: saga.Status(strings.ToUpper(f.status)), Error: f.reason, OlderThan: f.older}
	switch {
	case f.status != "" && !slices.Contains(saga.Statuses, s.Status):
		return s, usagef("--status %q is none; the statuses are %s", f.status, joinStatuses(saga.Statuses))
	case !utf8.ValidString(f.reason):
		return s, usagef("--error %q is not UTF-8, so no reason has it", f.reason) // a server cuts it off there
	case f.older < 0:
		return s, usagef("--older is %s; it must be positive", f.older)
	}
	if f.step != "" {
		if s.At = sagas().Positions(f.step); len(s.At) == 0 {
			return s, usagef("--step %q is a step of no saga that this binary knows; they are: %s", f.step, knownSteps())
		}
	}
	return s, nil
}

// warn tells of a type that may be misspelt. It is no error: another release may have its definition.
func (f *sagaFilter) warn(cmd *cobra.Command) {
	var known []string
	for _, d := range sagas().Definitions() {
		known = append(known, d.Type)
	}
	if f.typ != "" && !slices.Contains(known, f.typ) {
		slices.Sort(known)
		fmt.Fprintf(cmd.ErrOrStderr(), "no definition here has the type %q; there is %s\n", f.typ, strings.Join(slices.Compact(known), ", "))
	}
}

// sagas is an engine for reading: it knows the definitions.
func sagas() *saga.Engine { return handlers.NewEngine(slog.New(slog.DiscardHandler)) }

// knownSteps names the steps of the definitions that this binary knows.
func knownSteps() string {
	var list []string
	for _, d := range sagas().Definitions() {
		list = append(list, fmt.Sprintf("%s of %s %d", strings.Join(d.StepNames(), ", "), d.Type, d.Version))
	}
	return strings.Join(list, "; ")
}

func joinStatuses(list []saga.Status) string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = string(s)
	}
	return strings.Join(names, ", ")
}
