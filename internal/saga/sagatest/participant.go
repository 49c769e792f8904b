package sagatest

import (
	"context"
	"database/sql"
	"encoding/json"
	"maps"

	"backstep/client/participant"
	"backstep/internal/message"
	"backstep/internal/saga"
)

// Participant is another service that remote steps are for: one made by Service, or a fake that
// makes its replies with Completed, Refused and Failed.
type Participant func(ctx context.Context, c participant.Command) (participant.Reply, error)

// Participant has p answer the commands of a queue.
func (w *World) Participant(queue saga.Queue, p Participant) { w.participants[string(queue)] = p }

// Service is the participant that a service with this step is, with its tables in db.
func Service[In, Result any](db *sql.DB, s participant.Step[In, Result]) Participant {
	return func(ctx context.Context, c participant.Command) (participant.Reply, error) {
		return s.Handle(ctx, db, c)
	}
}

// Answer is what a participant says about a command.
type Answer struct {
	Status string `json:"status"`
	Result any    `json:"result,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Completed says that the command was done.
func Completed(result any) Answer { return Answer{Status: "completed", Result: result} }

// Refused says that it is not going to be.
func Refused(reason string) Answer { return Answer{Status: "refused", Error: reason} }

// Failed says that it may be the next time.
func Failed(reason string) Answer { return Answer{Status: "failed", Error: reason} }

// To makes the reply to c. Two replies are two messages.
func (a Answer) To(c participant.Command) participant.Reply {
	body, err := json.Marshal(a)
	if err != nil {
		panic(err) // a mistake of the test
	}
	return participant.Reply{
		RoutingKey: c.ReplyTo, MessageID: message.NewID(), Type: saga.ReplyType, ContentType: "application/json",
		Headers: maps.Clone(c.Headers), Body: body,
	}
}

// Command returns the last command of a remote step that was delivered.
func (w *World) Command(step string) participant.Command {
	w.t.Helper()
	for i := len(w.sent) - 1; i >= 0; i-- {
		if m := w.sent[i]; m.Headers.String(message.HeaderStep) == step {
			return command(m)
		}
	}
	w.t.Fatalf("sagatest: no command of a remote step %q has been delivered", step)
	return participant.Command{}
}

// Reply delivers an answer to the last command of a remote step whose queue has no Participant.
func (w *World) Reply(step string, a Answer) {
	w.t.Helper()
	w.engineGets(received(a.To(w.Command(step))))
}

// answer has the participant of m's queue answer it.
func (w *World) answer(m message.Message) message.Message {
	w.t.Helper()
	if w.refused[m.MessageID] {
		return received(Refused("no").To(command(m)))
	}
	r, err := w.participants[m.RoutingKey](w.t.Context(), command(m))
	if err != nil {
		w.t.Fatalf("sagatest: participant of queue %s: %v", m.RoutingKey, err)
	}
	return received(r)
}

func command(m message.Message) participant.Command {
	return participant.Command{MessageID: m.MessageID, ReplyTo: m.ReplyTo, Headers: maps.Clone(m.Headers), Body: m.Body}
}

// received is a reply as it comes from the broker.
func received(r participant.Reply) message.Message {
	return message.Message{
		Properties: message.Properties{
			MessageID: r.MessageID, Type: r.Type, CorrelationID: r.CorrelationID, ContentType: r.ContentType,
		},
		Headers: r.Headers, Body: r.Body, Exchange: message.CommandsExchange, RoutingKey: r.RoutingKey,
	}
}

// said tells in a word what a reply says.
func said(r message.Message) string {
	var a Answer
	if err := json.Unmarshal(r.Body, &a); err != nil {
		return "an answer that is no JSON"
	}
	if a.Error != "" {
		return a.Status + ": " + a.Error
	}
	return a.Status
}
