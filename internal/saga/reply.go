package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"backstep/internal/message"
)

const (
	// ReplyType is the type of the message with which another service answers the command of a
	// remote step. It echoes the command's x-saga-id, x-step, x-direction and x-attempt.
	ReplyType = "saga.reply"
	// RepliesQueue is where replies go: the reply_to of commands.
	RepliesQueue = "replies"
)

// reply is the body of a message of ReplyType.
type reply struct {
	Status string          `json:"status"` // completed, refused or failed
	Result json.RawMessage `json:"result"` // completed: what the action returned
	Error  string          `json:"error"`
}

const (
	replyCompleted = "completed"
	replyRefused   = "refused" // for good: a business rule says no
	replyFailed    = "failed"  // it may pass
)

// err returns what the reply says about the step.
func (r *reply) err() error {
	switch r.Status {
	case replyRefused:
		return &failure{r.Error}
	case replyFailed:
		return errors.New(r.Error)
	}
	return nil
}

func parseReply(body []byte) (*reply, error) {
	var r reply
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("reply does not decode: %w", err)
	}
	switch r.Status {
	case replyCompleted:
	case replyRefused, replyFailed:
		if r.Error == "" {
			r.Error = r.Status + ", and the reply does not say why"
		}
	default:
		return nil, fmt.Errorf("reply has status %q; it is completed, refused or failed", r.Status)
	}
	if len(r.Result) == 0 {
		r.Result = json.RawMessage("null")
	}
	return &r, nil
}

// checkReply decides whether a reply is what its saga waits for: Done. One that comes too late
// changes nothing, and is kept among the saga's actions.
func (b *batch) checkReply(ctx context.Context, c *command) (message.Outcome, error) {
	r, err := parseReply(c.Body)
	if err != nil {
		return message.Park("%v", err), nil
	}
	if out := b.findFor(c); out.Kind != message.Done {
		return out, nil
	}
	in, name := c.in, c.Headers.String(message.HeaderStep)
	direction := Direction(c.Headers.String(message.HeaderDirection))
	i := slices.IndexFunc(in.def.steps, func(s *step) bool { return s.name == name })
	switch {
	case i < 0 || !in.def.steps[i].remote:
		return message.Park("reply to step %q; saga type %q version %d has no such remote step", name, in.typ, in.version), nil
	case direction != Execute && direction != Compensate:
		return message.Park("reply to direction %q; it is execute or compensate", direction), nil
	}
	if r.Status == replyCompleted && direction == Execute {
		if err := in.def.steps[i].checkResult(r.Result); err != nil {
			return message.Park("reply to step %q has a result that does not decode: %v", name, err), nil
		}
	}
	awaited := in.awaitsReply(i, direction, c.Attempt(), r)
	if awaited && r.Status != replyCompleted {
		if awaited, err = b.isNews(ctx, in, c.Attempt(), r); err != nil {
			return message.Outcome{}, err
		}
	}
	if !awaited {
		return b.late(c, r), nil
	}
	c.reply = r
	return message.Outcome{Kind: message.Done}, nil
}

// isNews reports whether what one attempt did not come to says anything: another may be known to have
// done the step, though its reply could not be handled; or an operator has had it tried again since.
func (b *batch) isNews(ctx context.Context, in *instance, attempt int, r *reply) (bool, error) {
	kept, err := b.kept(ctx, in)
	if err != nil || isDone(kept) {
		return false, err
	}
	if r.Status != replyRefused || attempt == in.attempt {
		return true, nil
	}
	retried, err := b.retriedSince(ctx, in, attempt)
	return !retried, err
}

// awaitsReply reports whether a reply moves the saga on. One to an earlier attempt does: to the
// participant all attempts are one. That it failed is only news of the last.
func (in *instance) awaitsReply(step int, direction Direction, attempt int, r *reply) bool {
	return in.commandID != "" && step == in.current && direction == in.direction &&
		(attempt == in.attempt || attempt < in.attempt && r.Status != replyFailed)
}

// Served by ix_actions_saga.
const retriedSinceSQL = `
SELECT COUNT(*)
  FROM saga_actions
 WHERE saga_id = ?
   AND action = 'retry'
   AND JSON_UNQUOTE(JSON_EXTRACT(CONVERT(after_json USING utf8mb4), '$.step')) = ?
   AND JSON_UNQUOTE(JSON_EXTRACT(CONVERT(after_json USING utf8mb4), '$.direction')) = ?
   AND CAST(JSON_UNQUOTE(JSON_EXTRACT(CONVERT(after_json USING utf8mb4), '$.attempt')) AS SIGNED) > ?`

// retriedSince reports whether an operator has had the step that is awaited tried again after an
// attempt: that this was refused they knew, or would not have minded.
func (b *batch) retriedSince(ctx context.Context, in *instance, attempt int) (bool, error) {
	var n int
	// As bytes: to the server's collations "hotel" and "hotel " are one.
	args := []any{[]byte(in.id), []byte(in.stepName()), string(in.direction), attempt}
	if err := b.tx.QueryRow(ctx, retriedSinceSQL, args, &n); err != nil {
		return false, fmt.Errorf("read retries of saga %s: %w", in.id, err)
	}
	return n > 0, nil
}

// late keeps a reply that nobody waits for.
func (b *batch) late(c *command, r *reply) message.Outcome {
	in := c.in
	what := fmt.Sprintf("%s%d: %s", lateReply(c.Headers.String(message.HeaderDirection), c.Headers.String(message.HeaderStep)),
		c.Attempt(), strings.TrimSpace(r.Status+" "+r.Error))
	if r.Status == replyCompleted {
		what += ", result " + string(r.Result)
	}
	at := in.brief()
	b.actions = append(b.actions, action{in.id, "late reply", actorOf(c.Message), clip(what), at, at})
	return stale("saga %s is %s at step %s and does not wait for this reply", in.id, in.status, in.stepName())
}
