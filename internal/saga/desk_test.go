package saga

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// desk is a system that is not ours. What it does with a call is said beforehand; what was not is a
// success.
type desk struct {
	mu    sync.Mutex // guards below
	errs  map[Direction][]error
	calls []string // "execute <key>", "compensate <key>"
	infos []Info
	done  []booking // that compensations were told of
}

func (d *desk) fail(dir Direction, errs ...error) {
	if d.errs == nil {
		d.errs = map[Direction][]error{}
	}
	d.errs[dir] = errs
}

func (d *desk) call(_ context.Context, info Info) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, string(info.Direction)+" "+info.IdempotencyKey())
	d.infos = append(d.infos, info)
	if errs := d.errs[info.Direction]; len(errs) > 0 {
		d.errs[info.Direction] = errs[1:]
		if errs[0] != nil {
			return "", errs[0]
		}
	}
	return fmt.Sprintf("receipt %d", len(d.calls)), nil
}

// options are those of a step that calls the desk in both directions.
func (d *desk) options() []StepOption {
	return []StepOption{
		Retry(3, 1),
		Prepare(func(ctx context.Context, info Info, _ trip) (string, error) { return d.call(ctx, info) }),
		PrepareCompensation(func(ctx context.Context, info Info, _ trip, done booking) (string, error) {
			d.mu.Lock()
			d.done = append(d.done, done)
			d.mu.Unlock()
			return d.call(ctx, info)
		}),
	}
}

// paid makes the definition of a step "a", a step "pay" that calls the desk, and what comes behind.
func (s *script) paid(d *desk, behind ...string) *Definition {
	parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("pay", d.options()...))
	for _, name := range behind {
		parts = append(parts, s.part(name, Retry(3, 1)))
	}
	read := func(ctx context.Context, _ *sqltx.Tx) error {
		out, err := Prepared[string](ctx)
		if err == nil && !strings.HasPrefix(out, "receipt ") {
			err = fmt.Errorf("it was prepared with %q", out)
		}
		return err
	}
	s.on("pay", read)
	s.on("undo pay", read)
	return Define("trip", 1, parts...)
}

// leave delivers a message that must go outside, and returns its call.
func (w *world) leave(m message.Message) func(context.Context) any {
	w.t.Helper()
	o := w.deliver(m)[0]
	if o.Kind != message.Outside || o.Call == nil {
		w.t.Fatalf("the message is %s: %s; want it to go outside", o.Kind, o.Reason)
	}
	return o.Call
}

// outside delivers a message that must go outside, and returns it with its answer.
func (w *world) outside(m message.Message) message.Message {
	w.t.Helper()
	m.Answer = w.leave(m)(w.t.Context())
	return m
}

// served delivers a message that must go outside, and then its answer.
func (w *world) served(m message.Message) {
	w.t.Helper()
	w.done(w.outside(m))
}

// atDesk starts a saga and returns the command of its step "pay".
func (w *world) atDesk(name string) (id string, m message.Message) {
	w.t.Helper()
	id = w.start(name)
	w.done(w.command())
	return id, w.command()
}

// visit is a saga that has come to its step "pay".
type visit struct {
	*world
	desk desk
	id   string
	m    message.Message // the command of "pay"
}

func (s *script) visit(t *testing.T, behind ...string) *visit {
	t.Helper()
	v := &visit{}
	v.world = newWorld(t, s.paid(&v.desk, behind...))
	v.id, v.m = v.atDesk("x")
	return v
}

// journal returns the row of the call of a saga's step "pay": "STATUS calls".
func (w *world) journal(id string, d Direction) (row string) {
	w.t.Helper()
	w.must(w.db.QueryRowContext(w.t.Context(), `SELECT CONCAT(status, ' ', calls) FROM saga_calls WHERE saga_id = ? AND step_order = 1 AND direction = ?`,
		[]byte(id), string(d)).Scan(&row))
	return row
}

// journal demands what it says.
func (v *visit) journal(d Direction, want string) {
	v.t.Helper()
	equal(v.t, "journal", v.world.journal(v.id, d), want)
}

// is demands that the saga has a status, and returns it.
func (v *visit) is(want Status) Detail {
	v.t.Helper()
	got := v.get(v.id)
	equal(v.t, "status", got.Status, want)
	return got
}

// cancel asks for a saga to be cancelled, which must be accepted.
func (w *world) cancel(id string) {
	w.t.Helper()
	m := message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: CancelType}, Body: []byte(`{"reason":"not any more"}`)}
	m.Headers = message.Headers{message.HeaderSagaID: id}
	w.done(m)
}

// undo delivers the command that comes next, the compensation of "pay", and all that follow, and
// returns the saga, which must be compensated then.
func (v *visit) undo() Detail {
	v.t.Helper()
	m := v.command()
	if m.Headers.String(message.HeaderStep) != "pay" || m.Headers.String(message.HeaderDirection) != string(Compensate) {
		v.t.Fatalf("a command to %s %s, want the compensation of pay", m.Headers.String(message.HeaderDirection), m.Headers.String(message.HeaderStep))
	}
	v.served(m)
	v.run()
	return v.is(Compensated)
}
