package sagatest

import (
	"fmt"

	"backstep/internal/message"
	"backstep/internal/saga"
)

// kind is what can happen to a delivery.
type kind string

const (
	crash  kind = "crash"  // before the commit; of a participant: behind it, before its answer is out
	twice  kind = "twice"  // a crash behind the commit, before the ack
	later  kind = "later"  // a copy comes when all is over
	stale  kind = "stale"  // a copy of an earlier one comes before it, and the inbox has forgotten that one
	cancel kind = "cancel" // somebody cancels the saga before it

	reversed kind = "reversed" // an operator has the saga undone when it has completed

	failOnce   kind = "fail once"   // it does its work and then fails; a participant fails without having done it
	failAlways kind = "fail always" // likewise, at every attempt
	refuse     kind = "refuse"      // likewise, for good

	crashCall  kind = "crash amid a call" // the call is made, and its answer not written down
	unheard    kind = "unheard"           // the call is made, and its answer lost
	allUnheard kind = "all unheard"       // likewise, at every attempt

	// It, or in the last two every one like it, does not come in time for the deadline.
	overtaken kind = "overtaken" // but before what that leads to
	late      kind = "late"      // but when all is over
	lost      kind = "lost"      // and not at all
	allLate   kind = "all late"
	allLost   kind = "all lost"

	anew kind = "anew" // a reply is made twice: a second one with an id of its own
)

// fault is something that happens to one delivery.
type fault struct {
	kind kind
	at   int // number of the delivery, from 1; one more than there were: when all is over
	of   int // stale: number of the earlier one
}

// turn is a step in a direction: what a command asks for, or a reply answers.
type turn struct {
	step      string
	direction saga.Direction
	reply     bool
}

// entry is one delivery.
type entry struct {
	turn
	message  message.Message
	outline  saga.StepOutline
	deadline bool // the saga has one, as it comes
}

func (e *entry) String() string {
	what := e.step
	if e.direction == saga.Compensate {
		what = "undo " + what
	}
	if n := e.message.Attempt(); n > 1 {
		what += fmt.Sprintf(" (attempt %d)", n)
	}
	if e.reply {
		what = "reply to " + what
	}
	return what
}

// attempts returns how often the step is tried in this direction.
func (e *entry) attempts() int {
	if e.direction == saga.Compensate {
		return e.outline.Undos
	}
	return e.outline.Attempts
}

// kinds returns what can happen to a delivery, without what would be an operator's to mend.
func (e *entry) kinds() []kind {
	s := e.outline
	again := e.attempts() > 1 || s.PastPivot
	back := e.direction == saga.Execute && !s.PastPivot // it may fail for good
	vague := back && (!s.Remote && !s.Calls || s.Undoable || !s.Pivot)
	var ks []kind
	add := func(when bool, more ...kind) {
		if when {
			ks = append(ks, more...)
		}
	}
	add(true, crash, twice, later, cancel)
	add(e.reply, anew)
	add(!e.reply && (again || vague), failOnce)
	add(!e.reply && vague, failAlways)
	add(!e.reply && back && (vague || e.message.Attempt() == 1), refuse)
	add(s.Calls, crashCall)
	add(s.Calls && (again || vague), unheard)
	add(s.Calls && vague, allUnheard)
	add(s.Remote && (again || vague), overtaken, late, lost)
	add(s.Remote && again && vague, allLate, allLost)
	add(!s.Remote && e.deadline, overtaken)
	return ks
}

// reversible reports whether an operator may have the saga undone when it has completed: nothing
// else runs the compensation of a last step.
func (r *run) reversible() bool {
	some := false
	for _, s := range r.def.Outline() {
		if s.Pivot {
			return false
		}
		some = some || s.Undoable
	}
	return some
}

// faultsAfter returns what can happen behind delivery n of a run that went like r.
func (r *run) faultsAfter(n int) (faults []fault) {
	for i := n; i < len(r.seen); i++ {
		for _, k := range r.seen[i].kinds() {
			faults = append(faults, fault{kind: k, at: i + 1})
		}
		for of := 1; of < i; of++ { // that of the delivery just before is twice
			faults = append(faults, fault{kind: stale, at: i + 1, of: of})
		}
	}
	over := len(r.seen) + 1
	if r.reversible() {
		faults = append(faults, fault{kind: reversed, at: over})
	}
	return append(faults, fault{kind: cancel, at: over})
}
