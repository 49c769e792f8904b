package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// shownParked is a parked message as parked show tells of it.
type shownParked struct {
	inbox.ParkedRecord
	Payload   json.RawMessage      `json:"payload,omitempty"`        // if it is JSON, and not too large
	Base64    []byte               `json:"payload_base64,omitempty"` // if it is no JSON, and not too large
	Processed bool                 `json:"processed"`                // its queue has recorded its id
	Verdict   verdict              `json:"replay"`                   // what that would come to
	Why       string               `json:"replay_because,omitempty"`
	SagaID    string               `json:"saga_id,omitempty"`
	Saga      saga.Status          `json:"saga_status,omitempty"`
	Awaited   bool                 `json:"awaited"` // by the saga
	TraceID   string               `json:"trace_id,omitempty"`
	Removed   bool                 `json:"removed"` // it is in the audit alone
	Actions   []inbox.ParkedAction `json:"actions"`
	Advice    []string             `json:"advice"` // what is going on and what can be done, in words

	misnamed bool // a wish to cancel, and there is no saga of the id it has
	parked   inbox.Parked
	now      time.Time
}

// maxCopies is how many messages of one id are shown, and maxShownBody how large a body is in
// JSON.
const (
	maxCopies    = 5
	maxShownBody = 1 << 20
)

func newParkedShow() *cobra.Command {
	var f parkedFilter
	var body, asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one parked message: why, what it was, and what can be done",
		Long: `Shows the parked message with this id, as it was before it was parked: its properties and headers, also
if the copy could not carry them as they were. What a verb of this command has removed is shown from the
audit. With --json each is one JSON value, with a body of up to 1 MiB; properties and headers are in
the encoding that docs/messages.md describes.`,
		Example: `  backstep parked show 0194f1a4-5c00-7000-8000-000000000001
  backstep parked show 0194f1a4-5c00-7000-8000-000000000001 --queue payment --json | jq .headers
  backstep parked show 0194f1a4-5c00-7000-8000-000000000001 --body > body.bin`,
		Args: cobra.ExactArgs(1),
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			if body && asJSON {
				return usagef("--body and --json do not go together; --json has a body of up to 1 MiB")
			}
			f.ids = args
			if err := f.check(); err != nil {
				return err
			}
			return withParked(cmd, func(ctx context.Context, l *parkedLot) error {
				list, err := l.find(ctx, cmd, &f)
				if err != nil {
					return err
				}
				if body {
					_, err := cmd.OutOrStdout().Write(list[0].parked.Original.Body)
					return err
				}
				for i := range list {
					if asJSON {
						err = errors.Join(err, printJSON(cmd.OutOrStdout(), &list[i]))
						continue
					}
					if i > 0 {
						fmt.Fprintln(cmd.OutOrStdout())
					}
					list[i].print(cmd.OutOrStdout())
				}
				return err
			})
		}),
	}
	cmd.Flags().StringSliceVar(&f.queueNames, "queue", nil, "only if it was parked from one of these queues")
	cmd.Flags().BoolVar(&body, "body", false, "write the message's body as it was, and nothing else")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	return cmd
}

// find returns the messages with the filter's only id, from the queues or from the audit.
func (l *parkedLot) find(ctx context.Context, cmd *cobra.Command, f *parkedFilter) (list []shownParked, err error) {
	var found []inbox.Parked
	looks, err := l.walk(cmd, f.queues(), maxLook, "parked messages looked at", func(p *inbox.Parked) (bool, error) {
		if !f.chooses(p) {
			return false, nil
		}
		if found = append(found, *p); len(found) == maxCopies {
			return false, amqp.ErrEnough
		}
		return false, nil
	})
	sayWhatIsMissing(cmd, looks)
	if err != nil && (!errors.Is(err, amqp.ErrMissing) || len(found) == 0) {
		return nil, err
	}
	removed := len(found) == 0
	if removed {
		gone, err := l.lookBack(ctx, f.ids[0], f.queues())
		if err != nil {
			return nil, err
		}
		if gone.last == nil || gone.last.Verb == inbox.ParkedReplay {
			return nil, errors.New(gone.words)
		}
		kept, err := gone.last.Kept(ctx, l.db)
		if err != nil {
			return nil, err
		}
		found = append(found, kept)
	}
	for _, p := range found {
		s, err := l.shown(ctx, p, removed)
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

func (l *parkedLot) shown(ctx context.Context, p inbox.Parked, removed bool) (shownParked, error) {
	now, err := outbox.Now(ctx, l.db)
	if err != nil {
		return shownParked{}, err
	}
	m := &p.Original
	s := shownParked{
		ParkedRecord: p.Record(), SagaID: m.Headers.String(message.HeaderSagaID), TraceID: traceOf(m.Headers), Removed: removed, parked: p, now: now,
	}
	if len(m.Body) <= maxShownBody {
		if json.Valid(m.Body) {
			s.Payload = m.Body
		} else {
			s.Base64 = m.Body
		}
	}
	if s.Actions, err = inbox.ParkedActions(ctx, l.db, p.Name()); err != nil {
		return s, err
	}
	s.Actions = append([]inbox.ParkedAction{}, s.Actions...)
	seen, err := inbox.Recorded(ctx, l.db, p.Queue, []string{m.MessageID})
	if err != nil {
		return s, err
	}
	s.Processed = seen[m.MessageID]
	j := parkedJudge{db: l.db, retention: l.Inbox.Retention, now: now}
	if s.Verdict, s.Why, err = j.verdict(ctx, &p); err != nil {
		return s, err
	}
	d, found, err := j.sagaOf(ctx, &p)
	if err == nil && !found && m.Type == saga.CancelType {
		s.misnamed = true
		d, found, err = j.sagaOfRequest(ctx, cmp.Or(s.SagaID, correlationIn(m.Body)))
	}
	if err == nil && !found && m.RequestID() != "" {
		d, found, err = j.sagaOfRequest(ctx, m.RequestID())
	}
	if err != nil {
		return s, err
	}
	if found {
		s.SagaID, s.Saga, s.Awaited = d.ID, d.Status, d.CommandID != "" && d.CommandID == m.MessageID
	}
	s.Advice = parkedAdvice(&s)
	return s, nil
}

// correlationIn returns what a wish to cancel calls its saga.
func correlationIn(body []byte) string {
	var b struct {
		CorrelationID string `json:"correlation_id"`
	}
	_ = json.Unmarshal(body, &b) // what does not decode names none
	return b.CorrelationID
}

func (s *shownParked) print(out io.Writer) {
	w := columns(out)
	field := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, strings.ReplaceAll(printable(value), "\n", " "))
		}
	}
	field("message id", s.ID)
	if s.MessageID == "" {
		field("", "it had none; that is the one it got when it was parked")
	}
	field("type", s.Type)
	field("in", amqp.ParkedQueue(s.Queue))
	if s.From != s.Queue {
		field("parked from", s.From)
	}
	field("parked", parkedAge(s.ParkedAt, s.now))
	field("because", clipText(s.Reason, 1000))
	if s.Death != nil {
		field("dead-lettered", fmt.Sprintf("%s, for %s", times(s.Death.Count), s.Death.Reason))
	}
	field("does not decode", s.Fault)
	if s.Processed {
		field("processed", fmt.Sprintf("queue %s has recorded its id", s.Queue))
	} else {
		field("processed", "no")
	}
	if s.SagaID != "" {
		field("saga", s.SagaID+", "+cmp.Or(string(s.Saga), "which there is not")+map[bool]string{true: ", awaits it"}[s.Awaited])
	}
	field("trace id", s.TraceID)
	_ = w.Flush() // as for all that is printed: nobody is left to tell

	m := &s.parked.Original
	fmt.Fprintln(out, "\nproperties")
	if p, err := message.DecodeHeaders(s.Properties); err == nil { // they have the same encoding
		printHeaders(out, p)
	}
	fmt.Fprintln(out, "\nheaders")
	printHeaders(out, m.Headers)
	fmt.Fprintf(out, "\npayload, %s\n", plural(s.Bytes, "byte"))
	fmt.Fprintln(out, printPayload(m.Body))
	for _, a := range s.Actions {
		fmt.Fprintf(out, "\n%s: %s by %s, because: %s", clock(a.At), a.Verb, printable(a.Actor), printable(a.Reason))
	}
	fmt.Fprintln(out)
	for _, a := range s.Advice {
		fmt.Fprintln(out, printable(a))
	}
}
