package message

import (
	"context"
	"fmt"
	"time"
)

// Delivery is a message as a consumer of Queue received it.
type Delivery struct {
	Message
	Queue       string
	Tag         uint64 // of the channel it came on; meaningless anywhere else
	Redelivered bool
	Unreadable  string // why its headers are missing here; the broker has them
}

// Outcome is what a handler decided about one message of a batch.
type Outcome struct {
	Kind   OutcomeKind
	Reason string        // why it is parked, deferred or retried, in words
	After  time.Duration // Deferred: how long until it comes back
	// Deferred: the header that counts for how long it was handed back, which is limited; "" is
	// HeaderDeferredFor.
	Counter string

	// Outside: Call is made when the batch has committed, in no transaction, and the message comes
	// back in a later batch with what it returned as its Answer. Limit is how long it may take; 0
	// is the lane's. A call that panics is a Failure of the message.
	Call  func(ctx context.Context) any
	Limit time.Duration
}

// OutcomeKind tells the lane what to do with a message whose batch commits.
type OutcomeKind int

const (
	// Done: its effects, or the record of its failure, are in the transaction. It is acked.
	Done OutcomeKind = iota
	// Stale: a saga is already past it; nothing was done. It is acked.
	Stale
	// Parked: no redelivery can cure it; it goes to <queue>.parked with Reason.
	Parked
	// Deferred: it comes back with the same id, and no attempt is spent: of a saga that this worker does
	// not know, or of a step that it is not set up to run, or a reply whose handling failed.
	Deferred
	// Retry: failed in a way that may pass; the lane schedules the next attempt.
	Retry
	// Outside: it waits for a system that is not ours; the lane makes the Call. Nothing is
	// recorded and nothing acked yet.
	Outside
)

func (k OutcomeKind) String() string {
	switch k {
	case Done:
		return "done"
	case Stale:
		return "stale"
	case Parked:
		return "parked"
	case Deferred:
		return "deferred"
	case Retry:
		return "retry"
	case Outside:
		return "outside"
	}
	return fmt.Sprintf("OutcomeKind(%d)", int(k))
}

// Park returns the outcome that parks a message with a reason.
func Park(format string, args ...any) Outcome {
	return Outcome{Kind: Parked, Reason: fmt.Sprintf(format, args...)}
}

// Result is what became of one publish.
type Result struct {
	Tag    uint64 // the caller's own number for the message
	Kind   ResultKind
	Reason string // the broker's words, with exchange and routing key
}

// ResultKind keeps apart what the broker said.
type ResultKind int

const (
	// Confirmed: acked and not returned; the broker has it in at least one queue, or the
	// message was not mandatory.
	Confirmed ResultKind = iota
	// Nacked: the broker refused it for now (a full queue); it is in no queue we can count on.
	Nacked
	// Returned: no queue is bound for its exchange and routing key, or the exchange is missing.
	Returned
	// Lost: the connection or channel went away without blaming the message; the outcome is
	// unknown and a repeat may duplicate it.
	Lost
	// Aborted: the broker closed the channel or connection with an error code while it was in
	// flight, perhaps because of this message; the outcome is unknown.
	Aborted
	// Refused: it can never be published as it is (a header that does not fit a frame).
	Refused
)

func (k ResultKind) String() string {
	switch k {
	case Confirmed:
		return "confirmed"
	case Nacked:
		return "nacked"
	case Returned:
		return "returned"
	case Lost:
		return "lost"
	case Aborted:
		return "aborted"
	case Refused:
		return "refused"
	}
	return fmt.Sprintf("ResultKind(%d)", int(k))
}
