package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/trace"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// shownRow is a row as outbox show tells of it.
type shownRow struct {
	outbox.Item
	Properties json.RawMessage `json:"properties"` // in the encoding of docs/messages.md
	Headers    json.RawMessage `json:"headers"`
	Fault      string          `json:"fault,omitempty"` // why they do not decode
	Bytes      int             `json:"payload_bytes"`
	Payload    json.RawMessage `json:"payload,omitempty"`        // if it is JSON
	Base64     []byte          `json:"payload_base64,omitempty"` // if it is not
	SagaID     string          `json:"saga_id,omitempty"`
	TraceID    string          `json:"trace_id,omitempty"`
	Actions    []outbox.Action `json:"actions"`
	Advice     []string        `json:"advice"` // what is going on and what can be done, in words

	detail outbox.Detail
}

func newOutboxShow() *cobra.Command {
	var body, asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one outbox row: the message, why it waits, and what can be done",
		Long: `Shows the row with this id, or the rows of the message with this id. With --json each is one JSON
value; properties and headers are in the encoding that docs/messages.md describes.`,
		Example: `  backstep outbox show 4711
  backstep outbox show 0194f1a4-5c00-7000-8000-000000000001 --json | jq .headers
  backstep outbox show 4711 --body > body.bin`,
		Args: cobra.ExactArgs(1),
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			if body && asJSON {
				return usagef("--body and --json do not go together; --json has the payload")
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				ids, err := resolveRows(ctx, db, args)
				if err != nil {
					return err
				}
				if body && len(ids) > 1 {
					return usagef("message %q has the rows %v; name one of them", args[0], ids)
				}
				for i, id := range ids {
					d, err := outbox.Get(ctx, db, id)
					if err != nil {
						return err
					}
					s := show(&d)
					switch {
					case body:
						_, err = cmd.OutOrStdout().Write(d.Message.Body)
					case asJSON:
						err = printJSON(cmd.OutOrStdout(), s)
					default:
						if i > 0 {
							fmt.Fprintln(cmd.OutOrStdout())
						}
						s.print(cmd.OutOrStdout())
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&body, "body", false, "write the message's body as it is, and nothing else")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	return cmd
}

func show(d *outbox.Detail) shownRow {
	s := shownRow{
		Item: d.Item, Properties: rawOrText(d.RawProperties), Headers: rawOrText(d.RawHeaders), Fault: d.Fault,
		Bytes: len(d.Message.Body), SagaID: d.Message.Headers.String(message.HeaderSagaID), TraceID: traceOf(d.Message.Headers),
		Actions: append([]outbox.Action{}, d.Actions...), Advice: rowAdvice(d), detail: *d,
	}
	if json.Valid(d.Message.Body) {
		s.Payload = d.Message.Body
	} else {
		s.Base64 = d.Message.Body
	}
	return s
}

// traceOf returns the trace id in a traceparent header, "" if there is none.
func traceOf(h message.Headers) string {
	parts := strings.Split(h.String(message.HeaderTraceParent), "-")
	if len(parts) < 4 {
		return ""
	}
	id, err := trace.TraceIDFromHex(parts[1])
	if err != nil {
		return ""
	}
	return id.String()
}

// rawOrText returns b as it is, or as a JSON text if it is no JSON.
func rawOrText(b []byte) json.RawMessage {
	if json.Valid(b) {
		return b
	}
	text, err := json.Marshal(string(b))
	if err != nil {
		panic(err) // of a string: never
	}
	return text
}

func (s *shownRow) print(out io.Writer) {
	w := columns(out)
	field := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, strings.ReplaceAll(printable(value), "\n", " "))
		}
	}
	p := s.detail.Message.Properties
	field("row", fmt.Sprintf("%d, in shard %d", s.ID, s.Shard))
	field("message id", s.MessageID)
	field("type", p.Type)
	if s.Type != p.Type {
		field("event type", s.Type)
	}
	to := s.Destination()
	if s.Mandatory {
		to += ", mandatory"
	}
	field("to", to)
	field("key", s.Key)
	field("about", strings.TrimSpace(s.detail.Message.AggregateType+" "+s.detail.Message.AggregateID))
	field("status", string(s.Status))
	field("because", clipText(s.LastError, 1000))
	field("created", clock(s.CreatedAt)+" UTC")
	if !s.PublishedAt.IsZero() {
		field("published", fmt.Sprintf("%s UTC, %s ago", clock(s.PublishedAt), short(s.Age)))
	}
	field("attempts", fmt.Sprintf("%d, each refused by the broker", s.Attempts))
	if s.NextAttemptAt.After(s.CreatedAt.Add(s.Age)) { // later it waits for what its destination says to others
		field("next attempt", clock(s.NextAttemptAt)+" UTC")
	}
	if s.Generation > 0 {
		field("sent again", fmt.Sprintf("%d times by operators", s.Generation))
	}
	field("saga", s.SagaID)
	field("trace id", s.TraceID)
	field("does not decode", s.Fault)
	_ = w.Flush() // as for all that is printed: nobody is left to tell

	fmt.Fprintln(out, "\nproperties")
	if p, err := message.DecodeHeaders(s.detail.RawProperties); err == nil { // they have the same encoding
		printHeaders(out, p)
	}
	fmt.Fprintln(out, "\nheaders")
	printHeaders(out, s.detail.Message.Headers)
	fmt.Fprintf(out, "\npayload, %s\n", plural(s.Bytes, "byte"))
	fmt.Fprintln(out, printPayload(s.detail.Message.Body))
	for _, a := range s.Actions {
		fmt.Fprintf(out, "\n%s: %s by %s, because: %s", clock(a.At), a.Action, printable(a.Actor), printable(a.Reason))
	}
	fmt.Fprintln(out)
	for _, a := range s.Advice {
		fmt.Fprintln(out, printable(a))
	}
}

func printHeaders(out io.Writer, h message.Headers) {
	w := columns(out)
	for _, name := range slices.Sorted(maps.Keys(h)) {
		fmt.Fprintf(w, "  %s\t%s\n", printable(name), strings.ReplaceAll(printable(fmt.Sprint(h[name])), "\n", `\n`))
	}
	_ = w.Flush() // as above
}

// What a person wants to read of a payload.
const (
	shownJSON  = 2000 // bytes
	shownBytes = 64
)

// printPayload is a payload for a person: JSON if it is that and short, else its start.
func printPayload(b []byte) string {
	var pretty bytes.Buffer
	switch {
	case len(b) == 0:
		return "  empty"
	case len(b) <= shownJSON && json.Indent(&pretty, b, "  ", "  ") == nil:
		return "  " + printable(pretty.String())
	case utf8.Valid(b):
		return "  " + printable(clipText(string(b), 4*shownBytes)) + bodyHint(len(b) > 4*shownBytes)
	}
	return strings.TrimRight(hex.Dump(b[:min(len(b), shownBytes)]), "\n") + bodyHint(len(b) > shownBytes)
}

func bodyHint(cut bool) string {
	if !cut {
		return ""
	}
	return "\n  that is its start; --body writes all of it"
}
