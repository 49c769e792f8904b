package sagatest

import (
	"errors"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/saga"
)

// run is one run of a saga with faults.
type run struct {
	*certifier
	w      *World
	id     string
	faults []fault
	seen   []*entry // deliveries so far
	log    []string

	held     []message.Message // that are late
	first    []message.Message // that are late, but come before what their absence leads to
	copies   []message.Message // that come when all is over
	standing map[turn]kind     // what happens to every delivery of a turn
	failing  *turn             // whose function shall fail: in this delivery
	refusal  error             // what with
	deaf     *turn             // of which no answer to a call is heard: in this delivery
	called   bool              // a call has succeeded: in this delivery
	struck   bool              // what was to fail, or not to be heard, has: in this delivery
	endless  bool
}

func (r *run) say(format string, args ...any) { r.log = append(r.log, fmt.Sprintf(format, args...)) }

// play delivers until there is nothing left.
func (r *run) play() {
	for range maxMoves {
		m, ok := r.next()
		if !ok && !r.overFaults() {
			return
		}
		if ok {
			r.deliver(m)
		}
	}
	r.endless = true
}

// next returns the next message. If there is none time passes, and then what is late comes.
func (r *run) next() (m message.Message, ok bool) {
	for range maxMoves {
		if r.w.collect(); len(r.w.pending) > 0 {
			m, r.w.pending = r.w.pending[0], r.w.pending[1:]
			return m, true
		}
		if wait, ok := r.w.nextMoment(); ok {
			r.pass(wait)
			continue
		}
		// What is late has been counted as a delivery already.
		for _, m := range append(append(r.first, r.held...), r.copies...) {
			e := r.entry(m)
			r.say("! %s comes late: %s", e, r.w.deliver(m))
		}
		if len(r.first)+len(r.held)+len(r.copies) == 0 {
			return m, false
		}
		r.first, r.held, r.copies = nil, nil, nil
	}
	r.endless = true
	return m, false
}

// pass lets time pass; a deadline that passes is where the late come before what it leads to.
func (r *run) pass(d time.Duration) {
	if r.w.pass(d) == 0 {
		return
	}
	r.say("the deadline passes")
	for _, m := range r.first {
		r.say("! %s comes late: %s", r.entry(m), r.w.deliver(m))
	}
	r.first = nil
}

// overFaults does what is to happen when all is over, once.
func (r *run) overFaults() (any bool) {
	for i, f := range r.faults {
		if f.at != len(r.seen)+1 {
			continue
		}
		switch {
		case f.kind == cancel:
			r.say("! somebody cancels the saga")
			r.w.Cancel(r.id, "no longer wanted")
		case f.kind == reversed && r.w.Saga(r.id).Status == saga.Completed:
			r.say("! an operator has the completed saga undone")
			r.w.Reverse(r.id, "no longer wanted")
		default:
			continue
		}
		r.faults[i].at = 0
		any = true
	}
	return any
}

const hasDeadlineSQL = `SELECT deadline_at IS NOT NULL FROM saga_instances WHERE id = ?`

func (r *run) entry(m message.Message) *entry {
	return &entry{
		turn: turn{
			step: m.Headers.String(message.HeaderStep), direction: saga.Direction(m.Headers.String(message.HeaderDirection)),
			reply: m.Type == saga.ReplyType,
		},
		message: m, outline: r.w.step(m), deadline: r.w.Int(hasDeadlineSQL, []byte(r.id)) > 0,
	}
}

// deliver delivers a message, with all that happens to it.
func (r *run) deliver(m message.Message) {
	e := r.entry(m)
	r.seen = append(r.seen, e)
	kinds := map[kind]bool{r.standing[e.turn]: true}
	for _, f := range r.faults {
		if f.at != len(r.seen) {
			continue
		}
		kinds[f.kind] = true
		switch f.kind {
		case cancel:
			r.say("! somebody cancels the saga")
			r.w.Cancel(r.id, "no longer wanted")
		case stale:
			old := r.seen[f.of-1]
			if !r.w.remote(old.message) {
				r.w.forget(old.message)
			}
			r.say("! another copy of %s: %s", old, r.w.deliver(old.message))
		case allLate, allLost, failAlways, allUnheard:
			r.standing[e.turn] = f.kind
		}
	}
	switch {
	case kinds[lost], kinds[allLost]:
		r.say("! %s is lost", e)
	case kinds[late], kinds[allLate]:
		r.say("! %s is late", e)
		r.held = append(r.held, m)
	case kinds[overtaken]:
		r.say("! %s is late", e)
		r.first = append(r.first, m)
	default:
		r.arrive(e, kinds)
	}
}

// arrive is deliver for a message that gets there.
func (r *run) arrive(e *entry, kinds map[kind]bool) {
	m := e.message
	fails := kinds[refuse] || kinds[failOnce] || kinds[failAlways] && e.message.Attempt() <= max(e.attempts(), 3)
	if kinds[refuse] && e.outline.Remote {
		r.w.refused[m.MessageID] = true
	}
	switch {
	case fails && e.outline.Remote && !kinds[refuse]:
		a := Failed("this time not")
		r.say("! %s: %s, says the service, and has not done it", e, a.Error)
		r.w.pending = append(r.w.pending, received(a.To(command(m))))
		return
	case kinds[crash] && r.w.remote(m):
		r.say("! %s: the service does it and crashes before its answer is out: %s", e, said(r.w.answer(m)))
	case kinds[crashCall]:
		r.w.engineCalls(m)
		r.say("! %s: the worker crashes when its call is made, before it has written down the answer", e)
	case kinds[crash]:
		r.w.engineCrashes(m)
		r.say("! %s: the worker crashes before it commits", e)
	}
	what := e.String()
	if kinds[crash] || kinds[crashCall] {
		what += " again"
	}
	r.called, r.struck = false, false
	r.failing, r.refusal = nil, errors.New("this time not")
	if kinds[refuse] {
		r.refusal = saga.Fail("no")
	}
	if fails {
		r.failing = &e.turn
	}
	if kinds[unheard] || kinds[allUnheard] && e.message.Attempt() <= max(e.attempts(), 3) {
		r.deaf = &e.turn
	}
	became := r.w.deliver(m)
	switch {
	case e.reply:
	case e.outline.Remote && kinds[refuse]:
		what = "! " + what + ", which fails for good"
	case !e.outline.Remote && became == message.Done.String():
		became = r.became(kinds[refuse])
	}
	if r.struck {
		what = "! " + what
	}
	r.say("%s: %s", what, became)
	r.failing, r.deaf = nil, nil
	if kinds[twice] {
		r.say("! %s once more, because its ack was lost: %s", e, r.w.deliver(m))
	}
	if kinds[anew] {
		second := m
		second.MessageID = message.NewID()
		r.say("! %s once more, with another id: %s", e, r.w.deliver(second))
	}
	if kinds[later] {
		r.copies = append(r.copies, m)
	}
}

// became says what became of a local step in a delivery that the engine has handled.
func (r *run) became(forGood bool) string {
	fails := "fails"
	if forGood {
		fails += " for good"
	}
	switch {
	case r.w.worked:
		return "done"
	case r.struck && r.deaf != nil:
		return "its call succeeds, but nobody hears the answer"
	case r.struck && r.called:
		return "its call succeeds, and then it " + fails
	case r.struck:
		return "it does its work, and then " + fails
	case r.called:
		return "its call succeeds, and then it is not done"
	}
	return "not done"
}

// heard is whether nobody shall hear of a call that has succeeded.
func (r *run) heard(info saga.Info) error {
	r.called = true
	if r.deaf != nil && r.deaf.is(info) {
		r.struck = true
		return errors.New("the answer was lost")
	}
	return nil
}

// outcome is whether a function that has succeeded shall have failed.
func (r *run) outcome(info saga.Info) error {
	if r.failing != nil && r.failing.is(info) {
		r.struck = true
		return r.refusal
	}
	return nil
}

func (t turn) is(info saga.Info) bool { return t.step == info.Step && t.direction == info.Direction }
