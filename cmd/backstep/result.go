package main

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// result is the outcome of the demo.
type result struct {
	OK          bool         `json:"ok"`
	Orders      int          `json:"orders"`
	Relays      int          `json:"relays"`
	Workers     int          `json:"workers"`
	Outcomes    []outcome    `json:"outcomes"`
	Differences []difference `json:"differences"`

	SagasPerSecond float64 `json:"sagas_per_second"` // from the first submit to the last end
	P50            float64 `json:"p50_ms"`           // from an order's submit to its saga's end
	P99            float64 `json:"p99_ms"`
	Published      int     `json:"messages_published"` // outbox rows, without the orders themselves
	Duplicates     int64   `json:"duplicates"`         // that workers were delivered and dropped
	Conflicts      int64   `json:"conflicts"`          // deadlocks and lock waits: batches run again

	LedgerFaults []string `json:"ledger_faults,omitempty"` // --gateway: where the gateway's ledger and the orders differ

	Verify *findings `json:"verify"`
	Sample string    `json:"sample_saga"` // one that was undone, if there is one
}

// outcome is a row of the table.
type outcome struct {
	Name     string `json:"outcome"`
	Expected int    `json:"expected"`
	Actual   int    `json:"actual"`
}

// difference is an order that did not become what it should.
type difference struct {
	RequestID string `json:"request_id"`
	OrderID   string `json:"order_id,omitempty"`
	Expected  string `json:"expected"`
	Actual    string `json:"actual"`
}

// expectation is what is to become of a kind of order, and the words of its reason.
type expectation struct {
	kind                 kind
	name, status, reason string
}

var expected = []expectation{
	{kindFine, "CONFIRMED", "CONFIRMED", ""},
	{kindNoStock, "CANCELLED, not enough stock", "CANCELLED", "not enough stock"},
	{kindDecline, "CANCELLED, payment declined", "CANCELLED", "payment declined"},
	{kindRefuse, "CANCELLED, refused by the carrier", "CANCELLED", "no carrier ships to country ZZ"},
}

// nameOf returns the name of what became of an order.
func nameOf(o handlers.Outcome) string {
	for _, e := range expected {
		if o.Status == e.status && strings.Contains(o.Reason, e.reason) {
			return e.name
		}
	}
	return strings.TrimSuffix(o.Status+", "+o.Reason, ", ")
}

// eachOutcome calls f with what became of each order.
func (t *trial) eachOutcome(ctx context.Context, f func(handlers.Outcome)) error {
	for after := ""; ; {
		list, err := handlers.Outcomes(ctx, t.db, after, page)
		if err != nil {
			return err
		}
		for _, o := range list {
			after = o.OrderID
			f(o)
		}
		if len(list) < page {
			return nil
		}
	}
}

// outcomes compares what became of each order with what should have.
func (t *trial) outcomes(ctx context.Context, orders []order, r *result) error {
	byRequest := map[string]handlers.Outcome{}
	if err := t.eachOutcome(ctx, func(o handlers.Outcome) { byRequest[o.RequestID] = o }); err != nil {
		return err
	}
	want, got := map[string]int{}, map[string]int{}
	byOrder := make(map[string]*order, len(orders))
	for i := range orders {
		o := &orders[i]
		e := expected[slices.IndexFunc(expected, func(e expectation) bool { return e.kind == o.Kind })]
		want[e.name]++
		actual, found := byRequest[o.MessageID]
		name := "no order"
		if found {
			name = nameOf(actual)
			byOrder[actual.OrderID] = o
		}
		delete(byRequest, o.MessageID)
		if got[name]++; name != e.name {
			r.Differences = append(r.Differences, difference{o.MessageID, actual.OrderID, e.name, name})
		}
	}
	for _, o := range byRequest {
		name := nameOf(o)
		got[name]++
		r.Differences = append(r.Differences, difference{o.RequestID, o.OrderID, "no such order", name})
	}
	for _, e := range expected {
		r.Outcomes = append(r.Outcomes, outcome{e.name, want[e.name], got[e.name]})
		delete(got, e.name)
	}
	for name, n := range got {
		r.Outcomes = append(r.Outcomes, outcome{name, 0, n})
	}
	return t.latency(ctx, byOrder, r)
}

// latency finds from when to when each order's saga went. The submit is by our clock and the
// end by the database's, which may be another machine's.
func (t *trial) latency(ctx context.Context, byOrder map[string]*order, r *result) error {
	ahead, err := clockAhead(ctx, t.db)
	if err != nil {
		return err
	}
	sagas, _, err := saga.List(ctx, t.db, saga.Filter{Type: handlers.PlaceOrder.Type, Limit: len(byOrder) + 1})
	if err != nil {
		return err
	}
	var first, last time.Time
	var took []time.Duration
	for _, s := range sagas {
		o := byOrder[s.CorrelationID]
		if o == nil || s.FinishedAt.IsZero() {
			continue
		}
		if s.Status == saga.Compensated && s.Direction == saga.Compensate {
			r.Sample = s.ID
		}
		begin, end := o.msg.Time(), s.FinishedAt.Add(-ahead)
		took = append(took, end.Sub(begin))
		if first.IsZero() || begin.Before(first) {
			first = begin
		}
		if end.After(last) {
			last = end
		}
	}
	if len(took) == 0 {
		return nil
	}
	if r.Sample == "" {
		r.Sample = sagas[0].ID
	}
	slices.Sort(took)
	r.SagasPerSecond = float64(len(took)) / last.Sub(first).Seconds()
	r.P50, r.P99 = milliseconds(percentile(took, 0.50)), milliseconds(percentile(took, 0.99))
	return nil
}

// percentile is by the nearest rank; sorted must not be empty.
func percentile(sorted []time.Duration, p float64) time.Duration {
	return sorted[max(0, int(math.Ceil(p*float64(len(sorted))))-1)]
}

func milliseconds(d time.Duration) float64 {
	return math.Round(float64(d)/float64(time.Millisecond)*10) / 10
}

// clockAhead returns how far the database's clock is ahead of ours, to half a round trip.
func clockAhead(ctx context.Context, db *sql.DB) (time.Duration, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return 0, fmt.Errorf("compare clocks: %w", err)
	}
	defer conn.Close() //nolint:errcheck // hands it back to the pool
	best, ahead := time.Hour, time.Duration(0)
	for range 5 {
		before := time.Now()
		var there time.Time
		if err := conn.QueryRowContext(ctx, `SELECT NOW(6)`).Scan(&there); err != nil {
			return 0, fmt.Errorf("compare clocks: %w", err)
		}
		if trip := time.Since(before); trip < best {
			best, ahead = trip, there.Sub(before.Add(trip/2))
		}
	}
	return ahead, nil
}

// counts adds up what relays and workers did.
func (t *trial) counts(ctx context.Context, _ []order, r *result) error {
	rows, err := outbox.Counts(ctx, t.db)
	if err != nil {
		return err
	}
	r.Published = rows["PUBLISHED"]
	for _, p := range t.fleet.procs {
		if !strings.HasPrefix(p.name, "worker") {
			continue
		}
		var s inbox.Snapshot
		if err := p.get(ctx, "/stats", &s); err != nil {
			return fmt.Errorf("ask %s what it did: %w", p.name, err)
		}
		r.Duplicates += s.Duplicates
		r.Conflicts += s.Conflicts
	}
	return nil
}
