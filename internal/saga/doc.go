// Package saga runs sagas: a definition's steps one after another, each in a local
// transaction on the worker of its queue, and its compensations in reverse when a step fails.
// It owns saga_instances, saga_steps and saga_actions.
//
// Promised: every saga ends, COMPLETED, COMPENSATED or MANUAL_ACTION with a reason. A step
// takes effect once, together with the record of it and the next command. A command that is
// not the one awaited (saga_instances.command_id) does nothing.
//
//	           StepCompleted, StepRetried
//	              ┌───┐
//	 Start ──► RUNNING ──SagaCompleted──► COMPLETED
//	              │  ╲
//	   StepFailed │   ╲ StepFailedClean (nothing to undo)
//	              ▼    ╲
//	        COMPENSATING ──SagaCompensated──► COMPENSATED
//	          └───┘  │
//	StepCompensated, │ CompensationFailed, CommandParked (from RUNNING too)
//	Compensation-    ▼
//	Retried    MANUAL_ACTION ──ActionReturned, CompensationReturned──► where it was
//
// The whole table is in state.go.
package saga
