package saga

import (
	"context"
	"fmt"
	"strings"
)

// deed is what a participant did of a step that was left out while its command was with it.
type deed string

const (
	noDeed      deed = ""
	mayHaveDone deed = "may"
	hasDone     deed = "did" // it says so
)

// deedOf returns what became of a step that was left out. late: a reply that came too late says that it was done.
func deedOf(remote bool, row StepState, late bool) deed {
	switch {
	case late:
		return hasDone
	case !remote, row.Status != StepSkipped, row.Error != "": // see skip: it had been refused by then
		return noDeed
	}
	return mayHaveDone
}

// Served by ix_actions_saga.
const lateRepliesSQL = `
SELECT reason
  FROM saga_actions
 WHERE saga_id = ?
   AND action = 'late reply'`

// lateDeeds returns the steps that were left out and of which a reply said afterwards that they were done. Bit i is
// step i.
func (b *batch) lateDeeds(ctx context.Context, in *instance) (steps uint64, err error) {
	var remote uint64
	for i, s := range in.def.steps {
		if s.remote {
			remote |= 1 << i
		}
	}
	if in.skipped&remote == 0 {
		return 0, nil
	}
	reasons, err := b.lateReplies(ctx, in.id)
	if err != nil {
		return 0, fmt.Errorf("read late replies of saga %s: %w", in.id, err)
	}
	for i, s := range in.def.steps {
		for _, reason := range reasons {
			if in.skipped&remote&(1<<i) != 0 && saysDone(reason, s.name) {
				steps |= 1 << i
			}
		}
	}
	return steps, nil
}

func (b *batch) lateReplies(ctx context.Context, id string) (reasons []string, err error) {
	rows, err := b.tx.Query(ctx, lateRepliesSQL, []byte(id))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var reason string
		if err := rows.Scan(&reason); err != nil {
			return nil, err
		}
		reasons = append(reasons, reason)
	}
	return reasons, rows.Err()
}

// lateDeed is lateDeeds for one step, where the actions are known.
func (d Detail) lateDeed(step string) bool {
	for _, a := range d.Actions {
		if a.Action == "late reply" && saysDone(a.Reason, step) {
			return true
		}
	}
	return false
}

// lateReply begins what is kept of a reply that nobody waits for; its attempt and what it said follow.
func lateReply(direction, step string) string {
	return fmt.Sprintf("reply to %s step %s, attempt ", direction, step)
}

// saysDone reports whether what is kept of a late reply is that a step's action was done.
func saysDone(reason, step string) bool {
	rest, ok := strings.CutPrefix(reason, lateReply(string(Execute), step))
	said := strings.TrimLeft(rest, "0123456789")
	return ok && said != rest && strings.HasPrefix(said, ": "+replyCompleted)
}

// endedRefused reports whether a person ended a saga where its participant had refused the step at the first attempt
// and the saga still awaited that.
func (d Detail) endedRefused() bool {
	if d.Attempt != 1 {
		return false
	}
	awaited := false
	for _, a := range d.Actions {
		if a.Action == string(VerbResolve) {
			awaited = commandIn(a.Before) != ""
		}
	}
	for _, s := range d.Steps {
		if s.Order == d.CurrentStep {
			return awaited && s.Status == StepFailed
		}
	}
	return false
}
