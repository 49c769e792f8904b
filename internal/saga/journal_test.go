package saga

import "testing"

// The journal says what the last call came to: why it is not known stays until it is.
func TestJournalOfCalls(t *testing.T) {
	t.Parallel()
	s := &script{}
	v := s.visit(t)
	v.desk.fail(Execute, errPassing)
	row := func(status string, calls int, outcome, err string) {
		t.Helper()
		c := one(t, "calls", v.get(v.id).Calls)
		equal(t, "journal", []any{c.Status, c.Calls, string(c.Outcome), c.Error}, []any{status, calls, outcome, err})
	}
	v.served(v.m)
	row(callOpen, 1, "", errPassing.Error())
	m := v.scheduled()
	call := v.leave(m)
	row(callOpen, 2, "", errPassing.Error())
	m.Answer = call(t.Context())
	v.done(m)
	row(callDone, 2, `"receipt 2"`, "")
}

// A call that was refused has not happened: it is not said to be left as it is.
func TestLeftOfARefusedCall(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d)), s}
	id := o.start("x")
	o.done(o.command())
	m := o.command()
	d.fail(Execute, Fail("declined"))
	m = o.outside(m)
	m.Failure = "its hook failed"
	o.done(m)
	o.park(o.scheduled(), "poison")
	equal(t, "journal", o.journal(id, Execute), "REFUSED 1")
	equal(t, "resolved", o.does(id, Operation{Verb: VerbResolve, As: Compensated}).Detail, "it is COMPENSATED; not undone, unless that was done by hand: a")
}
