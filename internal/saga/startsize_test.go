package saga

import (
	"context"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// remoteRoom is what the command of a remote step needs besides the input.
const remoteRoom = len(`{"input":}`)

// A saga whose commands no worker would take is not started; one whose commands are as large as any
// worker takes runs to its end, and back.
func TestStartOfLargeInputs(t *testing.T) {
	t.Parallel()
	const around = len(`{"Name":"","Keys":null}`)
	quiet := Step("a", "a", func(_ context.Context, _ *sqltx.Tx, in trip) (string, error) { return in.Name, nil },
		func(context.Context, *sqltx.Tx, trip, string) error { return nil })
	for name, tt := range map[string]struct {
		parts []Part[trip]
		most  int // bytes of an input
	}{
		"local":        {nil, message.MaxBody},
		"remote":       {[]Part[trip]{RemoteStep[trip, booking]("r", "r")}, message.MaxBody - remoteRoom},
		"larger local": {[]Part[trip]{MaxBody[trip](1 << 20)}, 1 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			s := &script{}
			s.fail("c", Fail("no"))
			w := newWorld(t, Define("trip", 1, append(append(s.hooks(), quiet), append(tt.parts, s.part("c"))...)...))
			start := func(bytes int) (id string, err error) {
				err = sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
					id, _, err = Start(ctx, tx, w.def, message.NewID(), trip{Name: strings.Repeat("x", bytes-around)})
					return err
				})
				return id, err
			}
			if _, err := start(tt.most + 1); err == nil || !IsPermanent(err) || !strings.Contains(err.Error(), "its input is too large") {
				t.Errorf("one byte too many: %v, want that it is refused", err)
			}
			equal(t, "sagas", w.number(`SELECT COUNT(*) FROM saga_instances`), 0)
			id, err := start(tt.most)
			w.must(err)
			for range 5 {
				for _, m := range w.commands() {
					if limit := w.def.maxBody; len(m.Body) > limit {
						t.Errorf("body of %d bytes of %s %s", len(m.Body), m.Headers.String(message.HeaderDirection), m.Headers.String(message.HeaderStep))
					}
					if m.ReplyTo != "" {
						m = answer(m, `{"status":"completed","result":{"Ref":"`+strings.Repeat("r", 100)+`"}}`)
					}
					w.done(m)
				}
			}
			equal(t, "status", w.get(id).Status, Compensated)
		})
	}
}

// A result that would make a participant's command too large is left out of it: the participant has it
// too, and knows by the saga's id what is to be undone.
func TestResultTooLargeForACommand(t *testing.T) {
	t.Parallel()
	s := &script{}
	s.on("c", func(context.Context, *sqltx.Tx) error { return Fail("no") })
	w := newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("r", "r"), s.part("c"))...))
	const around = len(`{"input":{"Name":"x","Keys":null},"result":{"Ref":""}}`)
	for _, tt := range []struct {
		bytes   int
		carries bool
	}{{message.MaxBody - around, true}, {message.MaxBody - around + 1, false}} {
		w.exec(`DELETE FROM saga_instances`)
		w.start("x")
		w.done(answer(w.command(), `{"status":"completed","result":{"Ref":"`+strings.Repeat("r", tt.bytes)+`"}}`))
		w.done(w.command())
		m := w.command()
		equal(t, "it carries the result", strings.Contains(string(m.Body), `"result"`), tt.carries)
		if len(m.Body) > message.MaxBody {
			t.Errorf("body of %d bytes", len(m.Body))
		}
	}
}

// What HTML would have escaped is not: it would be six times as large.
func TestCommandsAreNotEscaped(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("r", "r"))...))
	id := w.start("<&>")
	local := w.command()
	w.done(local)
	equal(t, "local", string(local.Body), `{"Name":"<&>","Keys":null}`)
	equal(t, "remote", string(w.command().Body), `{"input":{"Name":"<&>","Keys":null}}`)
	equal(t, "result", string(w.get(id).Steps[0].Result), `{"Ref":"a of <&>"}`)
}
