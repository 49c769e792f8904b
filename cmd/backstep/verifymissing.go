package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// page is how many published messages are compared with the inbox at a time.
const page = sqltx.MaxIn

// processed looks for what was published and neither processed nor parked.
func (v verifier) processed(ctx context.Context, f *findings) error {
	reported := map[string]bool{} // one that workers handed back was published more than once
	for after := uint64(0); ; {
		published, err := outbox.PublishedCommands(ctx, v.db, after, v.retention, page)
		if err != nil {
			return err
		}
		byQueue := map[string][]string{}
		for _, p := range published {
			after = p.RowID
			if slices.Contains(handlers.Queues, p.Queue) { // another's queue has another's inbox
				byQueue[p.Queue] = append(byQueue[p.Queue], p.MessageID)
				f.Checked.Messages++
			}
		}
		for queue, ids := range byQueue {
			missing, err := v.missing(ctx, queue, ids)
			if err != nil {
				return err
			}
			for _, id := range missing {
				if !reported[queue+" "+id] {
					f.Violations = append(f.Violations, sqltx.Violation{
						Rule: "what was published was processed or parked", Subject: strings.ToValidUTF8(id, "\uFFFD"),
						Detail: fmt.Sprintf("published to %s and not in its inbox; if the broker dead-lettered it, it is in %[1]s.parked", queue),
					})
				}
				reported[queue+" "+id] = true
			}
		}
		if len(published) < page {
			return nil
		}
	}
}

// missing returns those of the ids of which nobody knows what became of them.
func (v verifier) missing(ctx context.Context, queue string, ids []string) (missing []string, err error) {
	for _, known := range []func(context.Context, sqltx.Querier, string, []string) (map[string]bool, error){
		inbox.Recorded, parkedOrRemoved,
	} {
		found, err := known(ctx, v.db, queue, ids)
		if err != nil {
			return nil, err
		}
		ids = slices.DeleteFunc(ids, func(id string) bool { return found[id] })
	}
	for some := range slices.Chunk(ids, page/2) {
		remains, err := outbox.RemainsOf(ctx, v.db, queue, some)
		if err != nil {
			return nil, err
		}
		sagaOf := map[string]string{}
		for id, r := range remains {
			if of := r.Headers.String(message.HeaderSagaID); of != "" && r.Type != saga.CancelType && r.Type != saga.ReplyType {
				sagaOf[id] = of
			}
		}
		void, err := saga.Void(ctx, v.db, sagaOf)
		if err != nil {
			return nil, err
		}
		for _, id := range some {
			if !void[id] && !remains[id].Waits { // what waits breaks a rule of its own
				missing = append(missing, id)
			}
		}
	}
	return missing, nil
}

// parkedOrRemoved returns which of ids are parked from queue, or have been taken out of its parked
// queue for good. One that was sent again from there is neither, until it is parked again.
func parkedOrRemoved(ctx context.Context, q sqltx.Querier, queue string, ids []string) (map[string]bool, error) {
	copies, err := outbox.ParkedCopies(ctx, q, queue, ids)
	if err != nil {
		return nil, err
	}
	known, err := inbox.Removed(ctx, q, queue, ids)
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		if known[id] || len(copies[id]) > 0 {
			if known[id], err = restsParked(ctx, q, queue, id, copies[id]); err != nil {
				return nil, err
			}
		}
	}
	return known, nil
}

// restsParked reports whether a message that a worker has parked, at these times, or an operator has
// removed, was not sent again since. An action names its copy by the time at which that was parked:
// when the action itself was written says nothing, since a worker may have parked it again before.
func restsParked(ctx context.Context, q sqltx.Querier, queue, id string, copies []time.Time) (bool, error) {
	actions, err := inbox.ParkedActions(ctx, q, message.Legible(id))
	if err != nil {
		return false, err
	}
	replayed := false // by what was done last
	for _, a := range actions {
		if a.Queue != queue {
			continue
		}
		replayed = a.Verb == inbox.ParkedReplay
		var r inbox.ParkedRecord
		_ = json.Unmarshal(a.Record, &r) // what is not ours names no copy
		copies = slices.DeleteFunc(copies, r.ParkedAt.Equal)
	}
	return !replayed || len(copies) > 0, nil
}
