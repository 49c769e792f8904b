package inbox

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// follow puts what follows from the outcomes into the transaction: parked copies, deferred
// and retried messages. Messages and outcomes correspond by index.
func (l *Lane) follow(ctx context.Context, tx *sqltx.Tx, ds []*message.Delivery, outcomes []message.Outcome) error {
	var parked []message.Message
	var later []outbox.Delayed
	var unrecorded []string
	now := time.Now()
	for i, o := range outcomes {
		d := ds[i]
		if o.Kind == message.Deferred && d.DeferredFor(counter(o)) >= l.cfg.DeferLimit {
			o = message.Park("%s, for longer than %s", o.Reason, l.cfg.DeferLimit)
		}
		if o.Kind == message.Retry && d.Attempt() >= l.cfg.MaxAttempts {
			o = message.Park("failed %d times: %s", d.Attempt(), o.Reason)
		}
		o.Reason = clip(o.Reason)
		switch o.Kind {
		case message.Parked:
			unrecorded = append(unrecorded, d.MessageID)
			if parkable(d) {
				parked = append(parked, parkedCopy(d, o.Reason, now))
			}
			if err := l.cfg.Parked(ctx, tx, &d.Message, o.Reason); err != nil {
				return err
			}
		case message.Deferred:
			unrecorded = append(unrecorded, d.MessageID)
			later = append(later, outbox.Delayed{Message: deferredCopy(d, o, now), After: o.After, Reason: o.Reason})
		case message.Outside:
			if o.Call == nil {
				panic("an outcome Outside without a Call")
			}
			unrecorded = append(unrecorded, d.MessageID)
		case message.Retry:
			later = append(later, outbox.Delayed{Message: nextAttempt(d), After: attempt.Delay(d.Attempt(), l.cfg.RetryBase, l.cfg.RetryMax), Reason: o.Reason})
		}
		outcomes[i] = o
	}
	if err := unrecord(ctx, tx, l.cfg.Queue, unrecorded); err != nil {
		return err
	}
	if err := outbox.Add(ctx, tx, parked...); err != nil {
		return err
	}
	return outbox.Schedule(ctx, tx, later...)
}

// comeBack returns a copy of d addressed to the queue it came from, and to no other.
func comeBack(d *message.Delivery) message.Message {
	m := copyOf(d)
	for _, name := range routing {
		delete(m.Headers, name)
	}
	m.Exchange, m.RoutingKey, m.Mandatory = message.CommandsExchange, d.Queue, true
	if key := d.Headers.String(message.HeaderOrderingKey); len(key) <= message.MaxIDBytes {
		m.OrderingKey = key
	}
	return m
}

func counter(o message.Outcome) string { return cmp.Or(o.Counter, message.HeaderDeferredFor) }

func deferredCopy(d *message.Delivery, o message.Outcome, now time.Time) message.Message {
	m := comeBack(d)
	m.Headers[counter(o)] = (d.DeferredFor(counter(o)) + o.After).String()
	if m.Headers.String(message.HeaderDeferredSince) == "" {
		m.Headers[message.HeaderDeferredSince] = now.UTC().Format(time.RFC3339Nano)
	}
	return m
}

// nextAttempt is a message of its own: a new id, the attempt counted, the first id kept.
func nextAttempt(d *message.Delivery) message.Message {
	m := comeBack(d)
	m.Headers[message.HeaderRequestID] = d.RequestID()
	m.Headers[message.HeaderAttempt] = strconv.Itoa(d.Attempt() + 1)
	m.MessageID = message.NewID()
	m.Timestamp = time.Time{}
	return m
}
