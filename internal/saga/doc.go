// Package saga runs sagas: a definition's steps one after another, each in a local
// transaction on the worker of its queue or by another service, and its compensations in reverse
// when a step fails. It owns the tables whose names begin with saga_.
//
// Promised: every saga ends, COMPLETED, COMPENSATED or MANUAL_ACTION with a reason. A step
// takes effect once, together with the record of it and the next command. A message that is
// not the one awaited (saga_instances.command_id, or a reply to it) does nothing. A call to
// a system that is not ours (Prepare) is made in no transaction, after its intent is committed and
// always with the same key; what may have happened there is never taken for what did not.
//
//	Start ──► RUNNING ──────► COMPLETED
//	           │   ╲              ╎ by an operator
//	a step     │    ╲ nothing     ▼
//	failed,    ▼     ╲ to undo  COMPENSATING
//	cancelled COMPENSATING ──► COMPENSATED
//	           │   ▲
//	           ▼   │ the command came back, or an operator
//	        MANUAL_ACTION ──► any of the others
//
// The whole table is in state.go, and docs/saga.md shows it. The inbox calls HandleBatch with what
// arrived. Whatever happens to an instance goes through batch.move: it looks the transition up,
// notes the rows to write, and does what follows; batch.write then writes all of a batch at once.
// What no message triggers, a Keeper does in each worker: deadlines, which stand still during
// outages, the rescue of commands that were lost on their way, asking a participant again that has not
// replied, and warnings of sagas that no definition here fits.
package saga
