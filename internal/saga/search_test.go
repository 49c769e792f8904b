package saga

import (
	"log/slog"
	"strings"
	"testing"
	"time"
)

// at moves an instance of put to a step, with a reason.
func at(w *world, id string, version, step int, reason string) {
	w.t.Helper()
	w.exec(`UPDATE saga_instances SET version = ?, current_step = ?, last_error = ? WHERE id = ?`, version, step, reason, []byte(id))
}

func listed(t *testing.T, w *world, f Filter) (ids string, partial bool) {
	t.Helper()
	list, partial, err := List(t.Context(), w.db, f)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, s := range list {
		all = append(all, s.ID)
	}
	return strings.Join(all, " "), partial
}

func TestListByStepAndError(t *testing.T) {
	t.Parallel()
	s := &script{}
	old, def := s.define("flight", "hotel", "car"), s.define("hotel", "car")
	def.Version = 2
	w := newWorld(t, old, def)
	put(t, w.db, "a", "trip", Running, time.Hour)
	at(w, "a", 1, 1, "Gateway AWAY for 3 s")
	put(t, w.db, "b", "trip", ManualAction, 2*time.Hour)
	at(w, "b", 2, 0, "hotel is full: ä%_")
	put(t, w.db, "c", "trip", Completed, 3*time.Hour)
	at(w, "c", 1, 1, "")
	put(t, w.db, "d", "trip", Running, 4*time.Hour)
	at(w, "d", 2, 1, "")
	put(t, w.db, "e", "other", Running, 0)
	at(w, "e", 1, 1, "gateway away")
	put(t, w.db, "f", "trip", Running, 90*time.Minute)
	at(w, "f", 2, 1, "")
	// Why the step is tried again is a reason where a saga is at it, and nowhere else.
	for _, id := range []string{"c", "f"} {
		w.exec(`INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, error) VALUES (?, 1, 'car', 'WAITING', 2, 'no CARS today')`, []byte(id))
	}
	w.exec(`INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, error) VALUES ('d', 0, 'hotel', 'FAILED', 2, 'no cars today')`)
	hotel := w.engine.Positions("hotel")
	for _, tt := range []struct {
		name string
		f    Filter
		want string
	}{
		{"a step, wherever its versions have it", Filter{At: hotel}, "a b"},
		{"a step of those that have ended", Filter{At: hotel, Status: Completed}, "c"},
		{"a part of the reason, whatever its case", Filter{Error: "GATEWAY away"}, "e a"},
		{"no wildcards", Filter{Error: "%_"}, "b"},
		{"why its step is tried again", Filter{Error: "cars TODAY"}, "f"},
		{"both, old ones first", Filter{At: hotel, Error: "F", OlderThan: time.Minute}, "b a"},
		{"all at once", Filter{At: hotel, Type: "trip", Error: "away", Status: Running, OlderThan: time.Minute, Limit: 1}, "a"},
	} {
		if got, partial := listed(t, w, tt.f); got != tt.want || partial {
			t.Errorf("%s: %q, partial %t, want %q", tt.name, got, partial, tt.want)
		}
	}
	list, _, err := List(t.Context(), w.db, Filter{Status: Running, Error: "cars today"})
	w.must(err)
	equal(t, "the reason", one(t, "sagas", list).StepError, "no CARS today")
	equal(t, "positions of a step that there is not", len(w.engine.Positions("boat")), 0)

	// What no index serves is looked for only so far, and that is said.
	for _, tt := range []struct {
		f       Filter
		want    string
		partial bool
	}{
		{Filter{Status: Running, Error: "for 3 s", Limit: 1}, "a", false}, // as many as were wanted
		{Filter{Status: Running, At: []Position{{"trip", 2, 1}}, Limit: 1}, "", true},
		{Filter{Status: Running, At: []Position{{"trip", 2, 1}}, Limit: 1, OlderThan: time.Minute}, "d", false},
		{Filter{Status: Running, Limit: 2}, "e a", false},
	} {
		tt.f.scan = 1
		if got, partial := listed(t, w, tt.f); got != tt.want || partial != tt.partial {
			t.Errorf("%+v: %q, partial %t, want %q, %t", tt.f, got, partial, tt.want, tt.partial)
		}
	}
}

// TestChoose: an action by filter is on all that fit, those that wait longest first.
func TestChoose(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i, id := range []string{"a", "b", "c"} {
		put(t, w.db, id, "trip", ManualAction, time.Duration(i)*time.Hour)
		at(w, id, 1, 0, "away")
	}
	put(t, w.db, "d", "trip", Running, 9*time.Hour)
	put(t, w.db, "f", "trip", Running, 8*time.Hour)
	put(t, w.db, "e", "trip", Completed, 9*time.Hour)
	for _, tt := range []struct {
		f    Filter
		want string
	}{
		{Filter{}, "c b a d f"},
		{Filter{Error: "AWAY"}, "c b a"},
		{Filter{Error: "away", Limit: 2}, "c b"},
		{Filter{OlderThan: 90 * time.Minute}, "c d f"},
		{Filter{Limit: 4}, "c b a d"},
		{Filter{Status: Completed}, "e"},
	} {
		tt.f.scan = 1 // is for lists
		ids, err := Choose(t.Context(), w.db, tt.f, []Status{ManualAction, Running})
		if got := strings.Join(ids, " "); err != nil || got != tt.want {
			t.Errorf("Choose(%+v) = %q, %v, want %q", tt.f, got, err, tt.want)
		}
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	s := &script{}
	first, second := s.define("hotel"), s.define("hotel", "car")
	second.Version = 2
	w := newWorld(t)
	w.engine = NewEngine(slog.New(slog.DiscardHandler), second, first)
	for id, st := range map[string]Status{"a": Running, "b": ManualAction, "c": Running, "d": Completed, "e": Compensated} {
		put(t, w.db, id, "trip", st, 0)
	}
	w.exec(`UPDATE saga_instances SET version = 3 WHERE id IN ('b', 'd')`)
	put(t, w.db, "x", "parcel", Compensating, 0)
	put(t, w.db, "f", "trip", ManualAction, 0)
	w.exec(`UPDATE saga_instances SET created_at = '2020-01-02' WHERE id = 'a'`)
	list, err := w.engine.Versions(t.Context(), w.db)
	if err != nil || len(list) != 4 {
		t.Fatalf("%+v, %v", list, err)
	}
	for i, want := range []Version{
		{"parcel", 1, false, map[Status]int{Compensating: 1}, list[0].Oldest},
		{"trip", 1, true, map[Status]int{Running: 2, ManualAction: 1}, time.Date(2020, 1, 2, 0, 0, 0, 0, time.UTC)},
		{"trip", 2, true, map[Status]int{}, time.Time{}},
		{"trip", 3, false, map[Status]int{ManualAction: 1}, list[3].Oldest},
	} {
		equal(t, "version", list[i], want)
		if list[i].Count() > 0 == list[i].Oldest.IsZero() {
			t.Errorf("%d live, the oldest at %s", list[i].Count(), list[i].Oldest)
		}
	}
}

// TestHistory: deadlines are by the clock on the wall, and what was done from outside is there.
func TestHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	put(t, w.db, "one", "trip", Running, 0)
	w.exec(`UPDATE saga_instances SET deadline_at = NOW(6), saga_deadline_at = NOW(6) + INTERVAL 1 HOUR, cancel_reason = 'no more' WHERE id = 'one'`)
	due := func() Detail {
		d, err := Get(t.Context(), w.db, "one")
		w.must(err)
		return d
	}
	equal(t, "due without an outage ever", due().UntilDue <= 0, true)
	w.exec(`REPLACE INTO saga_pulse (id, beat_at, up_since, downtime_us) VALUES (1, NOW(6), NOW(6), 600000000)`)
	w.exec(`INSERT INTO saga_calls (saga_id, step_order, direction, calls, error) VALUES ('one', 1, 'execute', 2, 'cut')`)
	w.exec(`INSERT INTO saga_actions (saga_id, action, actor, reason, before_json) VALUES ('one', 'retry', 'me', 'because', 'no json'), ('two', 'skip', 'me', 'x', NULL)`)
	d := due()
	if d.UntilDue < 9*time.Minute || d.UntilDue > 10*time.Minute || d.SagaDeadline.Sub(d.DeadlineAt).Round(time.Second) != time.Hour {
		t.Errorf("due in %s, the saga at %s, its step at %s", d.UntilDue, d.SagaDeadline, d.DeadlineAt)
	}
	equal(t, "cancel", d.CancelReason, "no more")
	c := one(t, "calls", d.Calls)
	if c.Step != 1 || c.Direction != Execute || c.Status != "OPEN" || c.Calls != 2 || c.Error != "cut" || c.Outcome != nil {
		t.Errorf("call %+v", c)
	}
	a := one(t, "actions", d.Actions)
	if a.Action != "retry" || a.Actor != "me" || a.Reason != "because" || string(a.Before) != `"no json"` || a.At.IsZero() {
		t.Errorf("action %+v", a)
	}
	w.exec(`INSERT INTO saga_consumers (queue, consumer, latest_at, idle_since, beat_at) VALUES
	      ('hotel', 'w1', NOW(6), NULL, NOW(6)), ('hotel', 'dead', NOW(6), NULL, NOW(6) - INTERVAL 1 HOUR), ('car', 'w2', NULL, NOW(6), NOW(6))`)
	list, err := Consumers(t.Context(), w.db, "hotel")
	if err != nil || len(list) != 1 || list[0].ID != "w1" || list[0].Latest.IsZero() || !list[0].IdleSince.IsZero() {
		t.Errorf("consumers %+v, %v", list, err)
	}
}
