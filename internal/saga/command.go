package saga

import (
	"cmp"
	"encoding/json"

	"backstep/internal/message"
)

// awaitNew makes the instance await a command that is not there yet.
func (in *instance) awaitNew() { in.commandID, in.rescues = message.NewID(), 0 }

// command makes the message that the instance awaits: it has step current run, in the instance's
// direction. requestID is the first id of the chain of attempts, "" if this is the first. done is what
// the action of a remote step returned, if that is to be undone and known.
func (in *instance) command(requestID string, done []byte) message.Message {
	s := in.step()
	m := message.Message{
		Properties: message.Properties{
			MessageID: in.commandID, Type: in.typ + "." + s.name, CorrelationID: in.id,
		},
		Headers: message.Headers{
			message.HeaderRequestID:   cmp.Or(requestID, in.commandID),
			message.HeaderSagaID:      in.id,
			message.HeaderSagaType:    in.typ,
			message.HeaderSagaVersion: int64(in.version),
			message.HeaderStep:        s.name,
			message.HeaderDirection:   string(in.direction),
			message.HeaderAttempt:     int64(in.attempt),
		},
		Body:     in.body(s, done),
		Exchange: message.CommandsExchange, RoutingKey: s.queue, Mandatory: true,
		OrderingKey: in.id, AggregateType: "saga", AggregateID: in.id,
	}
	if s.remote {
		m.ReplyTo = RepliesQueue
	}
	return m
}

// body makes the body of a command. What an action returned is left out if the body would be too
// large with it: a participant has to be able to do without, as where nobody knows that it returned.
func (in *instance) body(s *step, done []byte) []byte {
	if !s.remote {
		return in.payload
	}
	body := mustJSON(remoteCommand{Input: rawJSON(in.payload), Result: rawJSON(done)})
	if done != nil && len(body) > in.def.maxBody {
		return in.body(s, nil)
	}
	return body
}

// remoteCommand is the body of a remote step's command.
type remoteCommand struct {
	Input  json.RawMessage `json:"input"`
	Result json.RawMessage `json:"result,omitempty"` // of the action that is to be undone; none if that is not known, or too large
}
