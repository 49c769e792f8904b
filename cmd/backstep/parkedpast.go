package main

import (
	"context"
	"fmt"
	"strings"

	"backstep/internal/inbox"
)

// past is what is known of a message that is parked nowhere.
type past struct {
	last  *inbox.ParkedAction // what an operator last did to it; nil: nothing
	queue string              // it was parked from, or has processed it; "": none is known
	words string
}

// lookBack says what became of a message that is not parked any more, or never was.
func (l *parkedLot) lookBack(ctx context.Context, id string, queues []string) (past, error) {
	actions, err := inbox.ParkedActions(ctx, l.db, id)
	if err != nil {
		return past{}, err
	}
	if n := len(actions); n > 0 {
		a := &actions[n-1]
		seen, err := inbox.Recorded(ctx, l.db, a.Queue, []string{id})
		return past{a, a.Queue, pastWords(a, seen[id])}, err
	}
	for _, q := range queues {
		seen, err := inbox.Recorded(ctx, l.db, q, []string{id})
		if err != nil {
			return past{}, err
		}
		if seen[id] {
			return past{queue: q, words: fmt.Sprintf("it is not parked, and queue %s has processed it", q)}, nil
		}
	}
	return past{words: fmt.Sprintf("no such message is parked from %s: it never was, or has been removed by other means, or is on its way "+
		"(backstep outbox show %s); backstep parked list shows what there is", strings.Join(queues, ", "), quote(id))}, nil
}

// pastWords says what somebody did to a message that is not parked any more.
func pastWords(a *inbox.ParkedAction, processed bool) string {
	by := fmt.Sprintf("by %s at %s UTC: %s", a.Actor, clock(a.At), a.Reason)
	switch {
	case a.Verb == inbox.ParkedDrop:
		return "it was dropped " + by
	case a.Verb == inbox.ParkedDone:
		return "it had been processed, and was removed " + by
	case processed:
		return fmt.Sprintf("queue %s has processed it; it was replayed %s", a.Queue, by)
	}
	return fmt.Sprintf("queue %s has it, or has had it; it was replayed %s", a.Queue, by)
}
