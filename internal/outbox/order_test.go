package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// shardKeys returns n keys of one shard.
func shardKeys(shard, n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if k := fmt.Sprintf("key-%d", i); message.Shard(k) == shard {
			keys = append(keys, k)
		}
	}
	return keys
}

// A pass takes many reads, and each sees what was committed meanwhile. What commits between
// two of them must not let a later row of its key go first.
func TestOrderAcrossThePagesOfAPass(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	keys := shardKeys(3, 6)
	type flight struct {
		c   *fakeChannel
		tag uint64
	}
	first := make(chan flight, 1)
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if m.MessageID == keys[1] {
			first <- flight{c, tag} // stays in flight
			return nil
		}
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	early, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Add(t.Context(), sqltx.Join(early), keyed(command("q", "early"), keys[0])); err != nil {
		t.Fatal(err)
	}
	for _, k := range keys[1:] {
		add(t, db, keyed(command("q", k), k))
	}
	// One row is read at a time, and none while four are known.
	start(t, db, f, outbox.Config{Window: 1, Page: 1})
	hold := <-first
	if err := early.Commit(); err != nil {
		t.Fatal(err)
	}
	add(t, db, keyed(command("q", "late"), keys[0]))
	hold.c.answer(hold.tag, message.Confirmed, "")
	published(t, db, 7)
	sent := f.all()
	if e, l := slices.Index(sent, "early"), slices.Index(sent, "late"); e > l {
		t.Errorf("late was published before early: %v", sent)
	}
}

// steal makes another relay the owner of a shard.
func steal(t *testing.T, r *relay, db *sql.DB, shard int) {
	t.Helper()
	exec(t, db, `UPDATE outbox_shards SET owner = 'thief', epoch = epoch + 1, renewals = renewals + 1 WHERE shard = ?`, shard)
	eventually(t, "the relay notices", func() bool { return r.Shards() == message.Shards-1 })
}

// What a relay read before it lost a shard means nothing when it has the shard again: another
// may have published it meanwhile.
func TestShardLostAndRegained(t *testing.T) {
	t.Parallel()
	db, d := database(t), newDoor("q", message.Nacked)
	r := start(t, db, d, outbox.Config{LeaseTTL: 2 * time.Second})
	key := shardKeys(3, 1)[0]
	add(t, db, keyed(command("q", "a"), key))
	eventually(t, "the queue is found full", func() bool { return d.times("a") > 0 })
	steal(t, r, db, 3)
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED' WHERE message_id = 'a'`) // by the thief
	exec(t, db, `UPDATE outbox_shards SET owner = NULL WHERE shard = 3`)
	eventually(t, "the shard is ours again", func() bool { return r.Shards() == message.Shards })
	before := d.times("a")
	d.set(message.Confirmed)
	add(t, db, keyed(command("q", "b"), key))
	published(t, db, 2)
	if n := d.times("a") - before; n != 0 {
		t.Errorf("a row that another relay has published was published %d times more", n)
	}
}

// A line that is dropped because its shard has changed hands is read again from its beginning,
// although the pass that goes on is past that.
func TestDroppedLineIsReadInOrder(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	flown := make(chan *fakeChannel, 1)
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if m.MessageID == "k1" && len(f.all()) == 1 {
			flown <- c
			return nil
		}
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	keys := shardKeys(3, 10)
	msgs := []message.Message{keyed(command("q", "k1"), keys[0])}
	for _, k := range keys[1:] {
		msgs = append(msgs, keyed(command("q", k), k))
	}
	add(t, db, append(msgs, keyed(command("q", "k2"), keys[0]))...)
	// With four rows known the pass stops, before it comes to k2.
	r := start(t, db, f, outbox.Config{Window: 1, Page: 1, LeaseTTL: 2 * time.Second})
	c := <-flown
	steal(t, r, db, 3)
	exec(t, db, `UPDATE outbox_shards SET owner = NULL WHERE shard = 3`)
	eventually(t, "the shard is ours again", func() bool { return r.Shards() == message.Shards })
	c.end(message.Lost, "connection lost")
	published(t, db, len(msgs)+1)
	if sent := f.all()[1:]; slices.Index(sent, "k2") < slices.Index(sent, "k1") {
		t.Errorf("k2 was published before k1: %v", sent)
	}
}

// A decision about a row of a shard that is not ours any more writes nothing, and the rows
// behind it do not go on without it.
func TestStaleEpochWritesNothing(t *testing.T) {
	t.Parallel()
	for _, kind := range []message.ResultKind{message.Returned, message.Refused} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			db, f := database(t), &fake{}
			flown := make(chan func(message.ResultKind), 1)
			f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
				if m.MessageID == "a" && len(f.all()) == 1 {
					flown <- func(k message.ResultKind) { c.answer(tag, k, k.String()) }
					return nil
				}
				c.answer(tag, message.Confirmed, "")
				return nil
			}
			parked := func(context.Context, *sqltx.Tx, *message.Message, string) error {
				t.Error("Parked was called")
				return nil
			}
			start(t, db, f, outbox.Config{LeaseTTL: 10 * time.Second, Parked: parked, ParkAfter: time.Nanosecond})
			key := shardKeys(3, 1)[0]
			add(t, db, keyed(command("q", "a"), key), keyed(command("q", "b"), key))
			answer := <-flown
			// It is noticed only with the next renewal, two seconds later.
			exec(t, db, `UPDATE outbox_shards SET owner = 'thief', epoch = epoch + 1, renewals = renewals + 1 WHERE shard = 3`)
			answer(kind)
			never(t, "something is decided", 500*time.Millisecond, func() bool {
				return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PARKED' OR attempts > 0`) > 0
			})
			exec(t, db, `UPDATE outbox_shards SET owner = NULL WHERE shard = 3`)
			published(t, db, 2)
			if sent := f.all(); slices.Index(sent[1:], "a") > slices.Index(sent[1:], "b") {
				t.Errorf("b overtook a: %v", sent)
			}
		})
	}
}
