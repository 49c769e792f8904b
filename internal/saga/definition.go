package saga

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"backstep/internal/message"
)

// Definition is a saga's steps and hooks. An instance stays on the version it started with,
// so a definition in use is not edited: a changed one gets the next version and is registered
// beside it.
type Definition struct {
	Type    string
	Version int

	steps   []*step
	pivot   int           // index of the step that there is no way back from; len(steps): there is none
	within  time.Duration // deadline of the whole saga; 0: none
	maxBody int           // of a command, in bytes
	plan    string        // what must not change under an instance: the steps, and which can be undone
	hooks   hooks
	decode  func(payload []byte) (any, error)
}

type step struct {
	name       string
	queue      string
	action     function
	compensate function // nil: nothing to undo, or a remote step
	remote     bool     // its queue is another service's
	final      bool     // a remote step with nothing to undo
	pivot      bool
	retry      retryPolicy
	timeout    time.Duration // of one run of a function; 0: that of the transaction
	deadline   time.Duration // from the publish of its command to its end; 0: none
	lock       *lock

	prepare, prepareUndo *external // nil: it calls nobody

	checkResult func(result []byte) error // whether it decodes
}

// half is how long after its publish a command that has had no reply is emitted once more.
func (s *step) half() time.Duration { return s.deadline / 2 }

// undoable reports whether the step has a compensation.
func (s *step) undoable() bool { return s.compensate != nil || s.remote && !s.final }

// attempts returns how often a step may be tried in a direction. A remote action is tried once if
// nobody says more, since a time-out leaves its outcome open; a compensation is tried again all the
// same, or one lost reply would need a person.
func (s *step) attempts(d Direction) int {
	if s.remote && d == Compensate {
		return max(s.retry.attempts, defaultRetry.attempts)
	}
	return s.retry.attempts
}

// Part is a step, a hook or a deadline of a definition for sagas with input In.
type Part[In any] func(d *Definition)

// Queue is the queue whose workers run a step.
type Queue string

// maxName is the longest name of a type or a step: both and a dot are a message's type, which
// has 255 bytes at most.
const maxName = 127

// maxSteps is how many bits saga_instances.skipped has.
const maxSteps = 64

// Define makes a definition of its parts: steps in the order they run, and hooks. It panics
// on what is a programmer's mistake, such as no steps, or two of one name; so does Step.
func Define[In any](typ string, version int, parts ...Part[In]) *Definition {
	d := &Definition{Type: typ, Version: version, maxBody: message.MaxBody, decode: func(b []byte) (any, error) { return decoded[In](b) }}
	for _, p := range parts {
		p(d)
	}
	switch {
	case typ == "" || len(typ) > maxName:
		d.mistake("its type must have 1 to %d bytes", maxName)
	case version < 1:
		d.mistake("its version must be 1 or more")
	case len(d.steps) == 0:
		d.mistake("it needs a step")
	case len(d.steps) > maxSteps:
		d.mistake("it has %d steps; %d is the limit", len(d.steps), maxSteps)
	case !encodes[In]():
		d.mistake("JSON cannot say its input %s", reflect.TypeFor[In]())
	}
	names := map[string]bool{}
	d.pivot = len(d.steps)
	for i, s := range d.steps {
		switch {
		case names[s.name]:
			d.mistake("two steps have the name %q", s.name)
		case s.pivot && d.pivot < i:
			d.mistake("two steps, %q and %q, are the pivot", d.steps[d.pivot].name, s.name)
		case s.undoable() && d.pivot < i:
			d.mistake("step %q, behind the pivot, has a compensation; nothing is compensated there", s.name)
		case s.pivot:
			d.pivot = i
		}
		names[s.name] = true
	}
	d.plan = d.describe()
	return d
}

func (d *Definition) mistake(format string, args ...any) {
	panic(fmt.Sprintf("saga.Define(%q, %d): ", d.Type, d.Version) + fmt.Sprintf(format, args...))
}

func (d *Definition) describe() string {
	steps := make([]string, len(d.steps))
	for i, s := range d.steps {
		steps[i] = s.name
		if s.undoable() {
			steps[i] += " (undoable)"
		}
		if s.pivot {
			steps[i] += " (pivot)"
		}
		if s.remote {
			steps[i] += " (remote)"
		}
	}
	return strings.Join(steps, ", ")
}

// fits reports whether a saga that began with a plan and is at a step is one of this definition: a
// definition may have been edited in place. What an older release began has no plan.
func (d *Definition) fits(plan string, current int) bool {
	return (plan == "" || plan == d.plan) && current < len(d.steps)
}

// planned returns the names of the steps in a plan, for people: a name that has ", " in it is two.
func planned(plan string) []string {
	if plan == "" {
		return nil
	}
	names := strings.Split(plan, ", ")
	for i := range names {
		for _, what := range []string{" (remote)", " (pivot)", " (undoable)"} { // the last comes first
			names[i] = strings.TrimSuffix(names[i], what)
		}
	}
	return names
}

// encodes reports whether JSON can say values of type T.
func encodes[T any]() bool {
	var zero T
	_, err := json.Marshal(zero)
	_, unsupported := errors.AsType[*json.UnsupportedTypeError](err)
	return !unsupported
}

func (s *step) mistake(format string, args ...any) {
	panic(fmt.Sprintf("saga.Step(%q, %q): ", s.name, s.queue) + fmt.Sprintf(format, args...))
}

// undoFrom returns the index of the last step up to i that has a compensation and was not
// skipped, or -1.
func (d *Definition) undoFrom(i int, skipped uint64) int {
	for ; i >= 0; i-- {
		if d.steps[i].undoable() && skipped&(1<<i) == 0 {
			return i
		}
	}
	return -1
}

// StepNames returns the steps' names in order.
func (d *Definition) StepNames() []string {
	names := make([]string, len(d.steps))
	for i, s := range d.steps {
		names[i] = s.name
	}
	return names
}
