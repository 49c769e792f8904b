package saga

// model is what a saga must do, said as simply as it can be: no tables, no messages, no batches.
type model struct {
	steps   []modelStep
	status  Status
	dir     Direction
	at      int
	attempt int
	awaits  bool
	retried int // the attempt that an operator last asked a participant for
	rows    []StepStatus
	skipped map[int]bool
	stands  map[int]bool // what the step did, or may have done

	open  bool // a call was begun of which nobody knows whether it has happened
	kept  bool // it has happened, and what its step did with it failed
	noted bool // the saga is to be undone as soon as that is known
	made  int  // calls

	within bool         // the saga's own deadline can undo it yet
	late   bool         // it has passed
	due    bool         // it has a deadline, the saga's or the step's
	expect deadlineMode // what becomes of that
}

type modelStep struct {
	name                    string
	remote, undoable, pivot bool
	attempts                int
	calls, undoCalls        bool // another system, before its function runs
	limited                 bool // by a deadline of its own
	behind                  bool // the pivot
}

func newModel(steps []modelStep, within bool) *model {
	m := &model{steps: steps, within: within, rows: make([]StepStatus, len(steps)), skipped: map[int]bool{}, stands: map[int]bool{}}
	for i := range m.rows {
		m.rows[i] = StepPending
	}
	m.status = Running
	m.await(0, Execute)
	m.written()
	return m
}

func (m *model) step() modelStep { return m.steps[m.at] }

func (m *model) await(i int, dir Direction) {
	m.at, m.dir, m.attempt, m.retried, m.awaits = i, dir, 1, 0, true
	m.open, m.kept, m.expect = false, false, setDeadline
	m.sent()
}

// sent: a remote step shows that it waits.
func (m *model) sent() {
	switch {
	case m.step().remote && m.dir == Execute:
		m.rows[m.at], m.stands[m.at] = StepWaiting, true
	case m.step().remote:
		m.rows[m.at] = StepCompensating
	}
}

func (m *model) end(s Status) {
	m.status, m.awaits = s, false
	m.open = m.open && s == ManualAction
}

// written is the end of a transaction: the deadline is what it is now.
func (m *model) written() {
	s := m.step()
	if m.status != Running && m.status != ManualAction || m.dir == Execute && s.behind {
		m.within = false
	}
	switch {
	case !m.awaits, m.status == ManualAction, m.expect == noDeadline:
		m.due = false
	case m.expect == setDeadline:
		m.due = m.within || s.remote || s.limited && m.dir == Execute
	}
	m.expect = keepDeadline
}

// callsOut reports whether another system is called when the command comes.
func (m *model) callsOut() bool {
	return !m.kept && (m.dir == Execute && m.step().calls || m.dir == Compensate && m.step().undoCalls)
}

// begin is a call, if it is made: not that of a saga which is to be undone anyway.
func (m *model) begin() bool {
	m.back()
	if m.unknowable() {
		m.undo(m.at)
		m.written()
		return false
	}
	m.open, m.made = true, m.made+1
	m.stands[m.at] = m.stands[m.at] || m.dir == Execute
	m.rows[m.at] = map[Direction]StepStatus{Execute: StepRunning, Compensate: StepCompensating}[m.dir]
	m.written()
	return true
}

// unknowable is a saga that is to be undone, and nobody knows what its step's call has done.
func (m *model) unknowable() bool { return m.open && m.noted && m.dir == Execute }

// turn is the command, or the reply to it: what the call comes to, if one is made, and then the step.
func (m *model) turn(call, step error) {
	if m.callsOut() {
		if !m.begin() {
			return
		}
		if IsPermanent(call) {
			m.open = false
			m.stands[m.at] = m.dir == Compensate
			m.refuse()
			return
		}
		if call != nil {
			m.fail()
			return
		}
		m.kept = true
	}
	switch {
	case step == nil:
		m.succeed()
	case IsPermanent(step):
		m.refuse()
	default:
		m.fail()
	}
}

// undo compensates what can be, from step i down.
func (m *model) undo(i int) {
	for ; i >= 0; i-- {
		if m.steps[i].undoable && !m.skipped[i] {
			m.status = Compensating
			m.await(i, Compensate)
			return
		}
	}
	m.end(Compensated)
}

func (m *model) succeed() {
	m.back()
	unwanted := m.noted && !m.step().pivot && !m.step().behind
	m.noted = unwanted
	m.stands[m.at] = m.dir == Execute
	switch {
	case m.dir == Compensate:
		m.rows[m.at] = StepCompensated
		m.undo(m.at - 1)
	case unwanted:
		m.rows[m.at] = StepCompleted
		m.undo(m.at)
	case m.at == len(m.steps)-1:
		m.rows[m.at] = StepCompleted
		m.end(Completed)
	default:
		m.rows[m.at] = StepCompleted
		m.await(m.at+1, Execute)
	}
}

// refuse is a no for good. An earlier command of a remote step may be taken yet.
func (m *model) refuse() {
	m.back()
	if m.unknowable() {
		m.undo(m.at)
		return
	}
	if m.dir == Execute && m.step().remote && m.attempt == 1 {
		m.stands[m.at] = false
	}
	m.lose(m.step().remote && m.attempt > 1 || m.open)
}

// lose is a step that has failed for good; of some nobody knows whether they happened.
func (m *model) lose(unknown bool) {
	s := m.step()
	switch {
	case m.dir == Compensate:
		m.rows[m.at] = StepCompensating
		m.end(ManualAction)
	case s.behind, unknown && s.pivot && !s.undoable:
		m.rows[m.at] = StepFailed
		m.end(ManualAction)
	default:
		m.rows[m.at] = StepFailed
		m.undo(m.before(unknown))
	}
}

// before is the step from which on to undo.
func (m *model) before(unknown bool) int {
	if unknown {
		return m.at
	}
	return m.at - 1
}

func (m *model) fail() {
	m.back()
	if m.unknowable() {
		m.undo(m.at)
		return
	}
	limit := m.step().attempts
	if m.dir == Compensate && m.step().remote {
		limit = max(limit, 5)
	}
	if m.attempt >= limit && (!m.step().behind || m.dir == Compensate) {
		m.lose(m.step().remote || m.open)
		return
	}
	m.attempt++
	if m.step().remote {
		m.expect = setDeadline
	}
	m.rows[m.at] = map[Direction]StepStatus{Execute: StepRunning, Compensate: StepCompensating}[m.dir]
	m.sent()
}

// overdue is the deadline, of the saga if that counts yet, else of its step.
func (m *model) overdue() {
	m.late = true
	s := m.step()
	switch {
	case !m.due:
	case m.within && m.undoable():
		m.cancel()
	case m.within && m.noted && m.open:
		m.due = false
	case m.within: // not any more
		m.within, m.expect = false, setDeadline
	case s.remote:
		m.fail()
	case s.behind:
		m.due = false
	case m.open:
		m.cancel()
		m.due = false
	default:
		m.lose(false)
	}
}

func (m *model) park() {
	if m.awaits {
		m.status = ManualAction
	}
}

// back: what a saga awaits moves it on, also if it was stopped because that was parked.
func (m *model) back() {
	if m.status == ManualAction {
		m.status, m.expect = map[Direction]Status{Execute: Running, Compensate: Compensating}[m.dir], setDeadline
	}
}

// onward: what an operator lets go on is not undone because its time has passed meanwhile.
func (m *model) onward() {
	if m.status == ManualAction && m.dir == Execute && m.late {
		m.within = false
	}
	m.back()
}

// undoable reports whether a wish to have the saga undone is granted.
func (m *model) undoable() bool {
	s := m.step()
	switch {
	case m.status != Running && m.status != ManualAction, m.dir == Compensate, s.behind:
		return false
	case (s.remote || m.open) && s.pivot && !s.undoable:
		return false
	}
	return m.status == ManualAction || !m.open || !m.noted
}

func (m *model) cancel() {
	switch {
	case !m.undoable():
	case m.status == Running && m.open:
		m.noted, m.expect = true, noDeadline
	default:
		m.noted = true
		m.undo(m.before(m.step().remote || m.open))
	}
}

// retry by an operator: it has all its attempts again, but a participant tells attempts apart.
func (m *model) retry() {
	m.onward()
	if m.step().remote {
		m.attempt++
		m.retried = m.attempt
	} else {
		m.attempt = 1
	}
	m.awaits, m.expect = true, setDeadline
	m.sent()
}

// skip leaves out what it is at; an action that is left out is never undone.
func (m *model) skip() {
	if m.open {
		return // nobody knows whether there is anything to leave out
	}
	m.onward()
	m.rows[m.at] = StepSkipped
	switch {
	case m.dir == Compensate:
		m.undo(m.at - 1)
	case m.at == len(m.steps)-1:
		m.skipped[m.at] = true
		m.end(Completed)
	default:
		m.skipped[m.at] = true
		m.await(m.at+1, Execute)
	}
}

// reverse undoes a saga that has completed, if there is something to undo and no pivot: a person may have said
// that it has, so not all of its steps need have happened, and some may have been undone.
func (m *model) reverse() {
	some := false
	for i, s := range m.steps {
		if s.pivot {
			return
		}
		some = some || s.undoable && !m.skipped[i] && m.stands[i]
	}
	if some {
		for i := range m.steps {
			m.skipped[i] = m.skipped[i] || !m.stands[i]
		}
		m.undo(len(m.steps) - 1)
	}
}
