package saga

import "fmt"

// Status is an instance's.
type Status string

// The statuses of an instance. COMPLETED and COMPENSATED are final.
const (
	Running      Status = "RUNNING"
	Completed    Status = "COMPLETED"
	Compensating Status = "COMPENSATING"
	Compensated  Status = "COMPENSATED"
	ManualAction Status = "MANUAL_ACTION"
)

// StepStatus is a step's.
type StepStatus string

// The statuses of a step. A step without a row is PENDING.
const (
	StepPending      StepStatus = "PENDING"
	StepRunning      StepStatus = "RUNNING"
	StepWaiting      StepStatus = "WAITING"
	StepCompleted    StepStatus = "COMPLETED"
	StepFailed       StepStatus = "FAILED"
	StepCompensating StepStatus = "COMPENSATING"
	StepCompensated  StepStatus = "COMPENSATED"
	StepSkipped      StepStatus = "SKIPPED"
)

// Direction tells an action from its compensation.
type Direction string

// The directions, as they stand in the x-direction header.
const (
	Execute    Direction = "execute"
	Compensate Direction = "compensate"
)

// Event is what happened to an instance.
type Event string

// The events.
const (
	EvStepCompleted       Event = "StepCompleted"       // its action succeeded; there is a next step
	EvSagaCompleted       Event = "SagaCompleted"       // the last action succeeded
	EvStepRetried         Event = "StepRetried"         // its action failed in a way that may pass
	EvStepFailed          Event = "StepFailed"          // it failed for good; there is something to undo
	EvStepFailedClean     Event = "StepFailedClean"     // it failed for good; there is nothing to undo
	EvStepCompensated     Event = "StepCompensated"     // its compensation succeeded; there is another
	EvSagaCompensated     Event = "SagaCompensated"     // the last compensation succeeded
	EvCompensationRetried Event = "CompensationRetried" // its compensation failed in a way that may pass
	EvCompensationFailed  Event = "CompensationFailed"  // its compensation failed for good
	EvCommandParked       Event = "CommandParked"       // the command it awaits was parked
	EvActionReturned      Event = "ActionReturned"      // a parked action command came back
	EvCompensationBack    Event = "CompensationReturned"
)

// rule is one legal transition: where the instance goes, and what the step concerned becomes.
type rule struct {
	to   Status
	step StepStatus // "": the step's row is not touched
}

// rules is every legal transition. Anything else is refused.
var rules = map[Status]map[Event]rule{
	Running: {
		EvStepCompleted:   {Running, StepCompleted},
		EvSagaCompleted:   {Completed, StepCompleted},
		EvStepRetried:     {Running, StepRunning},
		EvStepFailed:      {Compensating, StepFailed},
		EvStepFailedClean: {Compensated, StepFailed},
		EvCommandParked:   {ManualAction, ""},
	},
	Compensating: {
		EvStepCompensated:     {Compensating, StepCompensated},
		EvSagaCompensated:     {Compensated, StepCompensated},
		EvCompensationRetried: {Compensating, StepCompensating},
		EvCompensationFailed:  {ManualAction, StepCompensating},
		EvCommandParked:       {ManualAction, ""},
	},
	ManualAction: {
		EvActionReturned:   {Running, ""},
		EvCompensationBack: {Compensating, ""},
	},
	Completed:   {},
	Compensated: {},
}

// next returns the rule for ev in status s, or an error that names both.
func next(s Status, ev Event) (rule, error) {
	r, ok := rules[s][ev]
	if !ok {
		return rule{}, fmt.Errorf("saga: no transition from %s on %s", s, ev)
	}
	return r, nil
}
