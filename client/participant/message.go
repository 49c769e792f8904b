package participant

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"backstep/internal/message"
)

// Exchange is where commands come from and replies go to.
const Exchange = message.CommandsExchange

// ErrNoCommand means that a message is no command to a participant: it has no message id, no
// reply_to, not the headers, or a body that is not JSON. No redelivery can cure it: dead-letter it.
var ErrNoCommand = errors.New("not a saga's command")

// Command is a delivery of the service's queue, as any AMQP client has it.
type Command struct {
	MessageID string
	ReplyTo   string
	Headers   map[string]any
	Body      []byte
}

// Reply is to be published to Exchange, persistent and mandatory, with all that it has. The answer
// to copies of one command has one message id, so that the saga takes it once.
type Reply struct {
	RoutingKey    string
	MessageID     string
	Type          string
	CorrelationID string
	ContentType   string
	Headers       map[string]any
	Body          []byte
}

// Info is what a step's function may know about the saga it works for.
type Info struct {
	SagaID  string
	Step    string
	Attempt int // of the saga's engine, from 1
}

// echoed are the headers that a reply has from its command.
var echoed = []string{
	message.HeaderSagaID, message.HeaderSagaType, message.HeaderStep, message.HeaderDirection, message.HeaderAttempt,
	message.HeaderRequestID,
	message.HeaderTraceParent, message.HeaderTraceState,
}

const (
	execute    = "execute"
	compensate = "compensate"

	replyPrefix = "re:" // and the command's id is the reply's
	maxName     = 255   // bytes of a saga's id and a step's name that the table can hold
)

// parsed is a command that can be handled.
type parsed struct {
	*Command
	Info
	direction string
	input     json.RawMessage
}

func parse(c *Command) (*parsed, error) {
	h := message.Headers(c.Headers)
	m := message.Message{Headers: h}
	p := &parsed{
		Command:   c,
		Info:      Info{SagaID: h.String(message.HeaderSagaID), Step: h.String(message.HeaderStep), Attempt: m.Attempt()},
		direction: h.String(message.HeaderDirection),
	}
	var body struct {
		Input json.RawMessage `json:"input"`
	}
	err := json.Unmarshal(c.Body, &body)
	switch {
	case c.MessageID == "" || len(replyPrefix+c.MessageID) > message.MaxIDBytes:
		err = fmt.Errorf("a message_id of %d bytes", len(c.MessageID))
	case c.ReplyTo == "":
		err = errors.New("no reply_to")
	case p.SagaID == "" || len(p.SagaID) > maxName:
		err = fmt.Errorf("an %s of %d bytes", message.HeaderSagaID, len(p.SagaID))
	case p.Step == "" || len(p.Step) > maxName:
		err = fmt.Errorf("an %s of %d bytes", message.HeaderStep, len(p.Step))
	case p.direction != execute && p.direction != compensate:
		err = fmt.Errorf("%s %q", message.HeaderDirection, p.direction)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCommand, err)
	}
	p.input = body.Input
	return p, nil
}

// answer is the body of a reply.
type answer struct {
	Status string          `json:"status"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

func completed(result []byte) answer { return answer{Status: "completed", Result: result} }

// refused says no for good.
func refused(reason string) answer { return answer{Status: "refused", Error: reason} }

// failed says that the same may work another time.
func failed(err error) answer { return answer{Status: "failed", Error: clip(err.Error())} }

// clip returns s as valid text that a column or a body can hold.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 4<<10)], "\uFFFD") }

func (p *parsed) reply(a answer) (Reply, error) {
	body, err := message.EncodeJSON(a)
	if err != nil {
		return Reply{}, fmt.Errorf("answer command %s of saga %s: %w", p.MessageID, p.SagaID, err)
	}
	r := Reply{
		RoutingKey: p.ReplyTo, MessageID: replyPrefix + p.MessageID, Type: "saga.reply",
		CorrelationID: p.SagaID, ContentType: "application/json", Headers: map[string]any{}, Body: body,
	}
	for _, name := range echoed {
		if v, ok := p.Headers[name]; ok {
			r.Headers[name] = v
		}
	}
	return r, nil
}
