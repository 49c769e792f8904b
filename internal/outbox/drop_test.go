package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// dropper returns a dropper that notes whom it told.
func dropper(told *[]string) outbox.Dropper {
	return outbox.Dropper{
		Operator: outbox.Operator{Actor: "ops@host", Reason: "poison"}, Patience: patience,
		Parked: func(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
			*told = append(*told, m.MessageID+" "+m.Headers.String("h")+" "+reason)
			return nil
		},
	}
}

func drop(t *testing.T, db *sql.DB, d outbox.Dropper, messageIDs ...string) []outbox.Fate {
	t.Helper()
	var ids []uint64
	for _, id := range messageIDs {
		ids = append(ids, rowID(t, db, id))
	}
	fates, err := d.Drop(t.Context(), db, ids)
	if err != nil || len(fates) != len(ids) {
		t.Fatalf("Drop(%v) = %v, %v", messageIDs, fates, err)
	}
	return fates
}

// Without a relay nothing can be in flight. What is dropped is gone, can be read back from the
// audit, and whoever waits for it was told; twice is once.
func TestDrop(t *testing.T) {
	t.Parallel()
	db, told := database(t), []string(nil)
	poison := command("q", "parked")
	poison.Headers, poison.Body = message.Headers{"h": "v", "n": int32(7)}, []byte("\x00raw")
	add(t, db, poison, command("q", "pending"), command("q", "sent"), command("q", "stays"))
	exec(t, db, `UPDATE outbox_events SET headers = 'no JSON' WHERE message_id = 'pending'`)
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) WHERE message_id = 'sent'`)
	park(t, db, "parked")
	d := dropper(&told)
	ids := []uint64{rowID(t, db, "parked"), rowID(t, db, "pending"), rowID(t, db, "sent"), 999}
	for _, want := range [][]string{
		{"dropped", "dropped", "it is PUBLISHED", "there is no such row"},
		{"dropped before, by ops@host", "dropped before, by ops@host", "it is PUBLISHED", "there is no such row"},
	} {
		fates, err := d.Drop(t.Context(), db, ids)
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range fates {
			if !strings.HasPrefix(f.Detail, want[i]) || f.Dropped != strings.HasPrefix(want[i], "dropped") {
				t.Errorf("fate of %d: %+v, want %q", ids[i], f, want[i])
			}
		}
	}
	equal(t, "rows left", []int{having(t, db, "PENDING"), having(t, db, "PARKED"), having(t, db, "PUBLISHED")}, []int{1, 0, 1})
	equal(t, "told", told, []string{
		"pending  withdrawn by ops@host, to be dropped: poison",
		"parked v dropped by ops@host: poison", "pending  dropped by ops@host: poison",
	})
	if got, want := audited(t, db), "withdraw pending ops@host poison, drop parked ops@host poison, drop pending ops@host poison"; got != want {
		t.Errorf("audited %q, want %q", got, want)
	}
	actions, err := outbox.ActionsOn(t.Context(), db, "parked")
	if err != nil || len(actions) != 1 {
		t.Fatalf("actions %v, %v", actions, err)
	}
	contains(t, "the audit", string(actions[0].Before), `"payload":"AHJhdw=="`, `"n":{"$int32":"7"}`, `"status":"PARKED"`, `"last_error":"NO_ROUTE"`, `"ordering_key":"parked"`)
}

// What whoever waits says undoes the drop.
func TestDropWhoeverWaitsFails(t *testing.T) {
	t.Parallel()
	db := database(t)
	add(t, db, command("q", "m"))
	d := dropper(new([]string))
	d.Parked = func(context.Context, *sqltx.Tx, *message.Message, string) error { return context.DeadlineExceeded }
	if fates, err := d.Drop(t.Context(), db, []uint64{1}); err == nil {
		t.Errorf("Drop = %v, want an error", fates)
	}
	equal(t, "pending, audited", []int{having(t, db, "PENDING"), number(t, db, `SELECT COUNT(*) FROM outbox_actions`)}, []int{1, 0})
}

// A relay has rows of a full queue in memory and tries them again and again. From the moment
// a drop returns it does not send the dropped ones any more; the others lose nothing.
func TestDropRowsThatARelayHolds(t *testing.T) {
	t.Parallel()
	const n = 40
	db, f := database(t), &fake{}
	var full atomic.Bool
	full.Store(true)
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if full.Load() && m.RoutingKey == "full" {
			c.answer(tag, message.Nacked, "full")
		} else {
			c.answer(tag, message.Confirmed, "")
		}
		return nil
	}
	var ids []string
	for i := range n {
		ids = append(ids, fmt.Sprintf("m%02d", i))
		add(t, db, keyed(command("full", ids[i]), fmt.Sprintf("k%d", i%20))) // some wait for their key's turn
	}
	r := start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	eventually(t, "rows are tried", func() bool { return len(f.all()) >= 5 })

	var told []string
	dropped := []string{"m00", "m01", "m21", "m33"}
	for _, fate := range drop(t, db, dropper(&told), dropped...) {
		if !fate.Dropped {
			t.Errorf("fate %+v", fate)
		}
	}
	times := map[string]int{}
	for _, id := range dropped {
		times[id] = f.times(id)
	}
	add(t, db, command("other", "other")) // nobody is delayed for long
	eventually(t, "another queue's is published", func() bool { return f.times("other") == 1 })
	full.Store(false)
	published(t, db, n-len(dropped)+1)
	for _, id := range dropped {
		if f.times(id) != times[id] {
			t.Errorf("%s was published %d times more after it was dropped", id, f.times(id)-times[id])
		}
	}
	for _, id := range ids {
		if times[id] == 0 && f.times(id) == 0 && !strings.Contains(strings.Join(dropped, " "), id) {
			t.Errorf("%s was lost", id)
		}
	}
	eventually(t, "the relay has all shards again", func() bool { return r.Shards() == message.Shards })
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE recalled`); n != 0 {
		t.Errorf("%d shards are still recalled", n)
	}
}

// What is in flight when it is to be dropped: confirmed, the drop is refused in words and the
// row is PUBLISHED, or gone if nothing is kept; refused, it is dropped and not tried again.
func TestDropRowInFlight(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		answer  message.ResultKind
		delete  bool // at publish
		dropped bool
		says    string
		rows    string // status of what is left
	}{
		{"confirmed", message.Confirmed, false, false, "was in flight: the broker has confirmed it", "PUBLISHED"},
		{"confirmed and deleted", message.Confirmed, true, false, "was published and has been deleted", ""},
		{"nacked", message.Nacked, false, true, "dropped", ""},
		{"returned", message.Returned, false, true, "dropped", ""},
		{"lost", message.Lost, false, true, "dropped", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db, f := database(t), &fake{}
			answer := make(chan struct{})
			f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
				go func() {
					<-answer
					if tt.answer == message.Lost {
						c.end(message.Lost, "gone")
						return
					}
					c.answer(tag, tt.answer, "no")
				}()
				return nil
			}
			t.Cleanup(sync.OnceFunc(func() { // if the test fails before
				select {
				case <-answer:
				default:
					close(answer)
				}
			}))
			add(t, db, command("q", "m"))
			start(t, db, f, outbox.Config{LeaseTTL: time.Second, DeletePublished: tt.delete, ParkAfter: time.Hour})
			eventually(t, "it is in flight", func() bool { return f.times("m") == 1 })
			id := rowID(t, db, "m")
			done := make(chan []outbox.Fate, 1)
			go func() {
				fates, err := dropper(new([]string)).Drop(context.Background(), db, []uint64{id})
				if err != nil {
					t.Error(err)
				}
				done <- fates
			}()
			eventually(t, "it is withdrawn and its shard recalled", func() bool {
				return having(t, db, "PARKED") == 1 && number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE recalled`) == 1
			})
			never(t, "the drop decides before the broker", 300*time.Millisecond, func() bool { return len(done) > 0 })
			close(answer)
			fates := <-done
			if len(fates) != 1 || fates[0].Dropped != tt.dropped || !strings.Contains(fates[0].Detail, tt.says) {
				t.Errorf("fates %+v, want %q", fates, tt.says)
			}
			if got := text(t, db, `SELECT GROUP_CONCAT(status) FROM outbox_events`); got != tt.rows {
				t.Errorf("what is left is %q, want %q", got, tt.rows)
			}
			tries := f.times("m")
			add(t, db, command("q", "next"))
			eventually(t, "the relay goes on", func() bool { return f.times("next") > 0 })
			if f.times("m") != tries || tt.answer == message.Confirmed && tries != 1 {
				t.Errorf("published %d times, then %d", tries, f.times("m"))
			}
		})
	}
}

// An owner that does not answer leaves the row PARKED. The same command finishes the work when
// another relay has taken over.
func TestDropOwnerDoesNotAnswer(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	exec(t, db, `UPDATE outbox_shards SET owner = 'dead', epoch = 7`)
	exec(t, db, `INSERT INTO relay_members VALUES ('dead', 'host', 1, NOW(6), NOW(6) - INTERVAL 1 HOUR)`)
	add(t, db, command("q", "m"))
	id := rowID(t, db, "m")
	var told []string
	d := dropper(&told)
	d.Patience = 200 * time.Millisecond
	for range 2 {
		fate := drop(t, db, d, "m")[0]
		if fate.Dropped {
			t.Errorf("fate %+v", fate)
		}
		contains(t, "the fate", fate.Detail, "not dropped yet, but PARKED", "relay dead, whose last heartbeat was 1h0m0")
	}
	equal(t, "told", told, []string{"m  withdrawn by ops@host, to be dropped: poison"})

	start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	d.Patience = patience
	if fate := drop(t, db, d, "m")[0]; !fate.Dropped {
		t.Errorf("fate %+v", fate)
	}
	if n := f.times("m"); n != 0 {
		t.Errorf("published %d times", n)
	}
	if got, want := audited(t, db), "withdraw m ops@host poison, drop m ops@host poison"; got != want {
		t.Errorf("audited %q, want %q", got, want)
	}
	fates, err := d.Drop(t.Context(), db, []uint64{id})
	if err != nil || !fates[0].Dropped {
		t.Errorf("once more: %+v, %v", fates, err)
	}
}

// A row that was withdrawn and requeued meanwhile is somebody else's again.
func TestDropOfARequeuedRow(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, `UPDATE outbox_shards SET owner = 'slow', epoch = 7`)
	add(t, db, command("q", "m"))
	id := rowID(t, db, "m")
	done := make(chan []outbox.Fate, 1)
	go func() {
		fates, err := dropper(new([]string)).Drop(context.Background(), db, []uint64{id})
		if err != nil {
			t.Error(err)
		}
		done <- fates
	}()
	eventually(t, "it is recalled", func() bool { return number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE recalled`) == 1 })
	if _, err := outbox.Requeue(t.Context(), db, []uint64{id}, operator); err != nil {
		t.Fatal(err)
	}
	exec(t, db, `UPDATE outbox_shards SET owner = NULL, recalled = FALSE`)
	if fates := <-done; len(fates) != 1 || fates[0].Dropped || !strings.Contains(fates[0].Detail, "requeued it meanwhile") {
		t.Errorf("fates %+v", fates)
	}
	equal(t, "pending", []int{having(t, db, "PENDING")}, []int{1})
}

// Rows that are dropped and requeued at random, while relays publish and come and go, are
// never lost and never published under another id: each ends published or dropped.
func TestRepairsWhileRelaysRun(t *testing.T) {
	t.Parallel()
	const n = 60
	db, f := database(t), &fake{}
	var open atomic.Bool
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		switch {
		case m.RoutingKey == "refuse" && !open.Load():
			return outbox.ErrRefused // parked at once
		case m.RoutingKey == "full" && !open.Load():
			c.answer(tag, message.Nacked, "full")
		default:
			c.answer(tag, message.Confirmed, "")
		}
		return nil
	}
	start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	var all []string
	for i := range n {
		id := fmt.Sprintf("m%02d", i)
		all = append(all, id)
		add(t, db, command([]string{"refuse", "full", "q"}[i%3], id))
	}
	eventually(t, "rows are parked and held", func() bool { return having(t, db, "PARKED") == n/3 && having(t, db, "PUBLISHED") == n/3 })

	gone := map[string]bool{}
	for _, fate := range drop(t, db, dropper(new([]string)), "m00", "m01", "m03", "m04", "m30", "m31") {
		if !fate.Dropped {
			t.Errorf("fate %+v", fate)
		}
		gone[fate.MessageID] = true
	}
	counts := map[string]int{}
	for id := range gone {
		counts[id] = f.times(id)
	}
	open.Store(true)
	parked, err := outbox.Choose(t.Context(), db, outbox.Filter{}, outbox.StatusParked, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := outbox.Requeue(t.Context(), db, parked, operator); err != nil {
		t.Fatal(err)
	}
	published(t, db, n-len(gone))
	for _, id := range all {
		switch {
		case gone[id] && f.times(id) != counts[id]:
			t.Errorf("%s was dropped and then published", id)
		case !gone[id] && f.times(id) == 0:
			t.Errorf("%s was lost", id)
		}
	}
}
