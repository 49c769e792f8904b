package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/saga"
)

// verdict is what the replay of a parked message would come to.
type verdict string

const (
	wouldReplay verdict = "replay"  // it would be processed
	wouldRepeat verdict = "done"    // it would change nothing
	wouldRefuse verdict = "refused" // nobody knows what it would do
)

// parkedJudge says what replaying messages would come to.
type parkedJudge struct {
	db        *sql.DB
	retention time.Duration // as long the workers know what they have processed
	now       time.Time
	giveID    bool // to what has none
}

// verdict says what the replay of p would come to, and why. With giveID it may give p an id.
func (j *parkedJudge) verdict(ctx context.Context, p *inbox.Parked) (v verdict, why string, err error) {
	if p.Fault != "" {
		return wouldRefuse, "what it was before it was parked cannot be read: " + p.Fault, nil
	}
	m := &p.Original
	if m.MessageID == "" && j.giveID {
		m.MessageID = p.ID
	}
	if m.MessageID == "" {
		return wouldRefuse, "it had no message_id, without which no worker takes it", nil
	}
	seen, err := inbox.Recorded(ctx, j.db, p.Queue, []string{m.MessageID})
	if err != nil {
		return "", "", err
	}
	if seen[m.MessageID] {
		return wouldRepeat, fmt.Sprintf("queue %s has processed a message of this id", p.Queue), nil
	}
	d, found, err := j.sagaOf(ctx, p)
	switch {
	case err != nil:
		return "", "", err
	case found && m.Type == saga.CancelType && (d.Status == saga.Completed || d.Status == saga.Compensated):
		return wouldRepeat, fmt.Sprintf("its saga %s has ended, as %s: nothing is left to cancel", d.ID, d.Status), nil
	case found && !unasked(m) && d.CommandID != m.MessageID:
		return wouldRepeat, fmt.Sprintf("its saga %s is %s and does not await it", d.ID, d.Status), nil
	}
	made := m.Time()
	if made.IsZero() {
		made = p.At // at the latest
	}
	if age := j.now.Sub(made); !made.IsZero() && age > j.retention {
		return wouldRefuse, fmt.Sprintf("it was made %s ago, at %s UTC, and what was processed is known for %s (BACKSTEP_INBOX_RETENTION): "+
			"it may have been, and no worker takes it", short(age), clock(made), short(j.retention)), nil
	}
	return wouldReplay, "", nil
}

// unasked reports whether no saga awaits a message under its id, so that only the engine can say
// what it comes to: a wish to cancel, or a reply, which is also kept if it is late.
func unasked(m *message.Message) bool {
	return m.Type == saga.CancelType || m.Type == saga.ReplyType
}

// sagaOf returns the saga that p is for.
func (j *parkedJudge) sagaOf(ctx context.Context, p *inbox.Parked) (d saga.Detail, found bool, err error) {
	id, err := saga.IDOf(ctx, j.db, &p.Original)
	if err == nil && id != "" {
		d, err = saga.Get(ctx, j.db, id)
	}
	if errors.Is(err, saga.ErrNotFound) {
		return d, false, nil
	}
	return d, err == nil && id != "", err
}

// sagaOfRequest returns the saga of the order that a request made.
func (j *parkedJudge) sagaOfRequest(ctx context.Context, request string) (d saga.Detail, found bool, err error) {
	id, err := handlers.SagaOf(ctx, j.db, request)
	if err == nil {
		d, err = saga.Get(ctx, j.db, id)
	}
	if errors.Is(err, saga.ErrNotFound) {
		return d, false, nil
	}
	return d, err == nil, err
}
