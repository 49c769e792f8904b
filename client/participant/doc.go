// Package participant is for Go services that take part in sagas of Backstep with a MySQL
// database of their own: a saga's remote step is a command to the service's queue, and the service
// answers it. Step.Handle keeps the rules of docs/messages.md ("Taking part in a saga"): whatever
// the order, the number and the fate of the copies of a command, each effect happens once, an action
// whose compensation came first never happens, and each copy gets the same answer.
//
// It knows no AMQP library. The service takes a command off its queue, calls Handle, publishes
// what it returns, waits for the broker's confirm, and acks only then. A crash anywhere in between
// brings the command back, and the stored answer goes out again.
//
//	           ┌─────── action ───────► COMPLETED ──┐
//	(no row) ──┼── action refused ────► REFUSED ────┼── compensation ──► COMPENSATED
//	           └────────────────────────────────────┘
//
// A compensation of what is COMPLETED runs; without a row, or REFUSED, there is nothing to undo. What
// is COMPENSATED stays so: an action is refused, a compensation is answered as before.
package participant
