package main

import (
	"context"
	"slices"
	"strings"
	"testing"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// offered are the commands that saga show offers, as arguments, without the reason.
func (l *sagaLot) offered(id string) (commands [][]string, shown string) {
	l.t.Helper()
	shown = l.run("", "saga", "show", id).want(exitOK).stdout
	for line := range strings.Lines(shown) {
		if command, _, ok := strings.Cut(line, " --reason '…'    # "); ok {
			commands = append(commands, strings.Fields(strings.TrimPrefix(strings.TrimSpace(command), "backstep ")))
		}
	}
	return commands, shown
}

// TestShowOffersWhatIsAccepted: each command that saga show offers would be done, and each that would be is offered, wherever
// an order's saga stands.
func TestShowOffersWhatIsAccepted(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	reverse := func(request string) string {
		id := l.work(l.place(request), 3)
		l.run("", "saga", "compensate", id, "--reason", "x", "--actor", "ops").want(exitOK)
		return id
	}
	for name, id := range map[string]string{
		"new":                            l.place("a"),
		"RUNNING, at the last step":      l.work(l.place("b"), 2),
		"stopped at its payment":         l.park(l.work(l.place("c"), 1), "gateway away"),
		"stopped at its shipment":        l.park(l.work(l.place("d"), 2), "no carrier"),
		"COMPLETED":                      l.work(l.place("e"), 3),
		"being reversed":                 reverse("f"),
		"stopped at the first to undo":   l.park(reverse("g"), "no carrier"),
		"stopped at the last to undo":    l.park(l.work(reverse("h"), 2), "no stock"),
		"reversed":                       l.work(reverse("i"), 3),
		"of another release's steps":     l.otherSteps(l.park(l.place("j"), "poison")),
		"of an input that is no order's": l.noOrder(l.park(l.place("k"), "poison")),
	} {
		commands, shown := l.offered(id)
		d, err := saga.Get(t.Context(), l.db, id)
		if err != nil {
			t.Fatal(err)
		}
		step := stepOf(d, d.CurrentStep)
		for _, args := range [][]string{{"retry"}, {"skip", "--step", step}, {"skip", "--step", step, "--compensation"}, {"cancel"}, {"compensate"},
			{"resolve", "--as", "completed"}, {"resolve", "--as", "compensated"}} {
			args = slices.Concat([]string{"saga", args[0], id}, args[1:])
			offered := slices.ContainsFunc(commands, func(c []string) bool { return slices.Equal(c, args) })
			if args[1] == "compensate" && slices.ContainsFunc(commands, func(c []string) bool { return c[1] == "cancel" }) {
				continue // is the same
			}
			a := l.run("", slices.Concat(args, []string{"--dry-run"})...)
			if done := a.code == exitOK && !strings.Contains(a.stdout, "already so"); done != offered {
				t.Errorf("%s: %q is offered: %t, but comes to %d: %s%s\n%s", name, args, offered, a.code, a.stdout, a.stderr, shown)
			}
		}
	}
}

// otherSteps makes it a saga that began with steps which its version has not.
func (l *sagaLot) otherSteps(id string) string {
	execute(l.t, l.db, "UPDATE saga_instances SET plan = 'reserve-stock (undoable), pay, ship' WHERE id = '"+id+"'")
	return id
}

// noOrder makes its input one that does not decode.
func (l *sagaLot) noOrder(id string) string {
	execute(l.t, l.db, "UPDATE saga_instances SET payload = '[]' WHERE id = '"+id+"'")
	return id
}

// TestShowSaysWhatIsRefused: what the definition is against is not offered, and why is said.
func TestShowSaysWhatIsRefused(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	id := l.park(l.work(l.place("a"), 2), "no carrier")
	l.run("", "saga", "show", id).want(exitOK, "Its definition refuses, until that is put right:\n  skip --step create-shipment: order ",
		"cannot be CONFIRMED: it is charged and not shipped; ", "\n  resolve --as compensated: order ", "cannot be CANCELLED: it is charged and not shipped; refund the payment first\n")
	id = l.otherSteps(l.park(l.place("b"), "poison"))
	l.run("", "saga", "show", id).want(exitOK, "reserve-stock", "pay", "ship  ", "This binary can do nothing to it: saga "+id+" awaits step 1", "use the backstep of the release that knows it.")
}

// TestShowDoesNotWait for who has the saga in hand: it says so, and what the state allows.
func TestShowDoesNotWait(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	id := l.park(l.work(l.place("a"), 1), "gateway away")
	err := sqltx.WithTx(t.Context(), l.db, func(ctx context.Context, tx *sqltx.Tx) error {
		var one int
		if err := tx.QueryRow(ctx, "SELECT 1 FROM saga_instances WHERE id = ? FOR UPDATE", []any{[]byte(id)}, &one); err != nil {
			return err
		}
		l.run("", "saga", "show", id).want(exitOK, "backstep saga retry "+id, "backstep saga resolve "+id+" --as completed",
			"That could not be tried now (somebody has it in hand): this is what its state allows, and some of it may be refused.")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestCompensateOfWhatWasResolved: it is said which steps are undone, and which are not because they never happened.
func TestCompensateOfWhatWasResolved(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	id := l.park(l.work(l.place("a"), 2), "no carrier")
	execute(t, l.db, "INSERT INTO shipments (id, order_id, status) SELECT UUID(), id, 'CREATED' FROM orders")
	l.run("", "saga", "resolve", id, "--as", "completed", "--reason", "shipped by hand", "--actor", "ops").want(exitOK)
	const says = "it is undone; it goes on to compensate step charge-payment, then reserve-stock; did not happen, as far as is known, so not undone if that was done by hand: create-shipment\n"
	l.run("", "saga", "compensate", id, "--dry-run").want(exitOK, "saga "+id+": "+says)
	l.run("", "saga", "compensate", id, "--reason", "sent back", "--actor", "ops").want(exitOK, "saga "+id+": compensated: "+says)
	l.work(id, 2)
	l.run("", "saga", "show", id).want(exitOK, "It was undone as was asked for (reversed: sent back); did not happen, as far as is known, so not undone if that was done by hand: create-shipment.")
}
