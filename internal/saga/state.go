package saga

import "fmt"

// Event is what happened to an instance.
type Event string

// The events. docs/saga.md says what they are in the words that stand here.
const (
	EvStepSent            Event = "StepSent"            // the command of a remote step's action was sent
	EvCallBegun           Event = "CallBegun"           // the step's action is about to call a system that is not ours
	EvStepCompleted       Event = "StepCompleted"       // the step's action succeeded; there is a next step
	EvSagaCompleted       Event = "SagaCompleted"       // the last step's action succeeded
	EvStepUnwanted        Event = "StepUnwanted"        // the step's action succeeded, but by then the saga was to be undone; there is something to undo
	EvStepUnwantedClean   Event = "StepUnwantedClean"   // the step's action succeeded, but by then the saga was to be undone; there is nothing to undo
	EvStepRetried         Event = "StepRetried"         // the step's action failed in a way that may pass, and has attempts left
	EvStepFailed          Event = "StepFailed"          // the step's action failed for good, or at its last attempt; there is something to undo
	EvStepFailedClean     Event = "StepFailedClean"     // the step's action failed for good, or at its last attempt; there is nothing to undo
	EvStepRefused         Event = "StepRefused"         // the step's action failed for good, and there is no way back: the pivot has happened, or may have
	EvCompensationSent    Event = "CompensationSent"    // the command of a remote step's compensation was sent
	EvCompensationBegun   Event = "CompensationBegun"   // the step's compensation is about to call a system that is not ours
	EvStepCompensated     Event = "StepCompensated"     // the step's compensation succeeded; there is another to do
	EvSagaCompensated     Event = "SagaCompensated"     // the last compensation succeeded
	EvCompensationRetried Event = "CompensationRetried" // the step's compensation failed in a way that may pass, and has attempts left
	EvCompensationFailed  Event = "CompensationFailed"  // the step's compensation failed for good, or at its last attempt

	EvCancelRecorded Event = "CancelRecorded" // the saga was cancelled, or a deadline passed, amid a call, whose outcome is waited for
	EvCancelled      Event = "Cancelled"      // the saga was cancelled, or a deadline passed; there is something to undo
	EvCancelledClean Event = "CancelledClean" // the saga was cancelled, or a deadline passed; there is nothing to undo

	EvCommandParked        Event = "CommandParked"        // what it awaits was parked, the reply is of no use here, or it came to a deadline and does not fit its definition
	EvRescuesExhausted     Event = "RescuesExhausted"     // the command that the saga awaits was lost again and again
	EvDeadlineFailed       Event = "DeadlineFailed"       // a deadline passed, and to end the step or the saga by it failed again and again
	EvActionReturned       Event = "ActionReturned"       // the saga had stopped, and the action that it awaits is asked for, or answered, after all
	EvCompensationReturned Event = "CompensationReturned" // the saga had stopped, and the compensation that it awaits is asked for, or answered, after all

	EvRetriedNow              Event = "RetriedNow"              // an operator has the step's action tried at once
	EvCompensationRetriedNow  Event = "CompensationRetriedNow"  // an operator has the step's compensation tried at once
	EvStepSkipped             Event = "StepSkipped"             // an operator leaves the step's action out; there is a next step
	EvSagaSkipped             Event = "SagaSkipped"             // an operator leaves the last step's action out
	EvCompensationSkipped     Event = "CompensationSkipped"     // an operator leaves the step's compensation out; there is another to do
	EvLastCompensationSkipped Event = "LastCompensationSkipped" // an operator leaves the last compensation out
	EvReversed                Event = "Reversed"                // an operator has a completed saga undone
	EvResolvedCompleted       Event = "ResolvedCompleted"       // an operator says that all of the saga is done
	EvResolvedCompensated     Event = "ResolvedCompensated"     // an operator says that all of the saga is undone
)

// effect is what follows from a transition, besides what is written about the step.
type effect string

const (
	nothing   effect = ""                          // what it awaited it awaits still
	doNext    effect = "await the next action"     // of the step behind
	undoNext  effect = "await a compensation"      // of the last step that has to be undone
	tryLater  effect = "await it again, later"     // under a new id, after the back-off
	tryNow    effect = "await it again"            // under a new id
	complete  effect = "call OnCompleted"          // nothing is awaited any more
	undone    effect = "call OnCompensated"        // likewise
	askPerson effect = "call OnManualAction, tell" // what it awaited it awaits still, unless it failed
)

// rule is one legal transition: where the instance goes, what the step concerned becomes, and
// what follows. One that leaves MANUAL_ACTION calls OnResumed first.
type rule struct {
	to     Status
	step   StepStatus // "": the step's row is not touched
	effect effect
}

// rules is every legal transition. Anything else is refused.
var rules = map[Status]map[Event]rule{
	Running: {
		EvStepSent:          {Running, StepWaiting, nothing},
		EvCallBegun:         {Running, StepRunning, nothing},
		EvStepCompleted:     {Running, StepCompleted, doNext},
		EvSagaCompleted:     {Completed, StepCompleted, complete},
		EvStepUnwanted:      {Compensating, StepCompleted, undoNext},
		EvStepUnwantedClean: {Compensated, StepCompleted, undone},
		EvStepRetried:       {Running, StepRunning, tryLater},
		EvStepFailed:        {Compensating, StepFailed, undoNext},
		EvStepFailedClean:   {Compensated, StepFailed, undone},
		EvStepRefused:       {ManualAction, StepFailed, askPerson},
		EvCancelRecorded:    {Running, "", nothing},
		EvCancelled:         {Compensating, "", undoNext},
		EvCancelledClean:    {Compensated, "", undone},
		EvCommandParked:     {ManualAction, "", askPerson},
		EvRescuesExhausted:  {ManualAction, "", askPerson},
		EvDeadlineFailed:    {ManualAction, "", askPerson},
		EvRetriedNow:        {Running, "", tryNow},
		EvStepSkipped:       {Running, StepSkipped, doNext},
		EvSagaSkipped:       {Completed, StepSkipped, complete},
	},
	Compensating: {
		EvCompensationSent:        {Compensating, StepCompensating, nothing},
		EvCompensationBegun:       {Compensating, StepCompensating, nothing},
		EvStepCompensated:         {Compensating, StepCompensated, undoNext},
		EvSagaCompensated:         {Compensated, StepCompensated, undone},
		EvCompensationRetried:     {Compensating, StepCompensating, tryLater},
		EvCompensationFailed:      {ManualAction, StepCompensating, askPerson},
		EvCommandParked:           {ManualAction, "", askPerson},
		EvRescuesExhausted:        {ManualAction, "", askPerson},
		EvDeadlineFailed:          {ManualAction, "", askPerson},
		EvCompensationRetriedNow:  {Compensating, "", tryNow},
		EvCompensationSkipped:     {Compensating, StepSkipped, undoNext},
		EvLastCompensationSkipped: {Compensated, StepSkipped, undone},
	},
	ManualAction: {
		EvActionReturned:          {Running, "", nothing},
		EvCompensationReturned:    {Compensating, "", nothing},
		EvRetriedNow:              {Running, "", tryNow},
		EvCompensationRetriedNow:  {Compensating, "", tryNow},
		EvCancelled:               {Compensating, "", undoNext},
		EvCancelledClean:          {Compensated, "", undone},
		EvStepSkipped:             {Running, StepSkipped, doNext},
		EvSagaSkipped:             {Completed, StepSkipped, complete},
		EvCompensationSkipped:     {Compensating, StepSkipped, undoNext},
		EvLastCompensationSkipped: {Compensated, StepSkipped, undone},
		EvResolvedCompleted:       {Completed, "", complete},
		EvResolvedCompensated:     {Compensated, "", undone},
	},
	Completed: {
		EvReversed: {Compensating, "", undoNext},
	},
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
