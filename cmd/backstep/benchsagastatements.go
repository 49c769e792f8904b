package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/go-sql-driver/mysql"
	"golang.org/x/sync/errgroup"

	"backstep/internal/bench"
	"backstep/internal/handlers"
)

// statements are what workers and relays send to the database for the sagas of one run.
type statements struct {
	PerMessage float64     `json:"statements_per_message"` // of the workers, for each message they processed
	Counted    int         `json:"statements_sagas"`
	Kinds      []statement `json:"statements"`
}

// statement is one kind of them.
type statement struct {
	Process    string  `json:"process"` // worker or relay: all of them together
	Kind       string  `json:"statement"`
	PerSaga    float64 `json:"per_saga"`
	PerMessage float64 `json:"per_message"` // that the workers processed
}

func (s *statements) print(w io.Writer) {
	if s.Counted == 0 {
		return
	}
	t := newTable("process", "statement", "per saga", "per message")
	for _, k := range s.Kinds {
		t.AppendRow([]any{k.Process, k.Kind, fmt.Sprintf("%.3f", k.PerSaga), fmt.Sprintf("%.4f", k.PerMessage)})
	}
	fmt.Fprintf(w, "\nthe workers send %.3f statements for each message, %s counted:\n\n", s.PerMessage, plural(s.Counted, "saga"))
	render(w, t)
}

// maxCounted is how many orders are enough to count what they cost.
const maxCounted = 1000

// countStatements runs orders, in a place of their own, whose workers and relays reach the
// database through something that counts.
func (b *sagaBench) countStatements(ctx context.Context, like *station) (err error) {
	p, err := newPlace(ctx, "bench", like.servers, like.given)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.remove(true, true)) }()
	cfg, err := mysql.ParseDSN(p.config.MySQL.DSN)
	if err != nil {
		return errors.New("the database's address is not a DSN") // err would quote the password
	}
	if cfg.TLS != nil || cfg.TLSConfig != "" {
		like.say("statements are not counted: the connections to the database are encrypted")
		return nil
	}
	like.say("counting statements, in database and virtual host %s", p.name)
	// The counters outlive the processes whose connections they are, also after Ctrl-C.
	counting, stop := context.WithCancel(context.WithoutCancel(ctx))
	var parts errgroup.Group
	defer func() {
		stop()
		err = errors.Join(err, parts.Wait())
	}()
	counters, environments := map[string]*bench.Statements{}, map[string][]string{}
	for _, role := range []string{"worker", "relay"} {
		c, err := bench.CountStatements(cfg.Net, cfg.Addr)
		if err != nil {
			return err
		}
		parts.Go(func() error { return c.Run(counting) })
		through := cfg.Clone()
		through.Net, through.Addr = "tcp", c.Addr()
		q := *p
		q.config.MySQL.DSN = through.FormatDSN()
		counters[role], environments[role] = c, q.environment()
	}
	s, err := like.install(ctx, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.leave(ctx, err)) }()
	if err := handlers.Seed(ctx, s.db, b.skus(), sagaStock); err != nil {
		return err
	}
	if err := b.startAll(ctx, s, environments); err != nil {
		return err
	}
	return b.count(ctx, s, counters)
}

// count runs the orders.
func (b *sagaBench) count(ctx context.Context, s *station, counters map[string]*bench.Statements) error {
	n := min(b.orders, maxCounted)
	m := b.mix()
	orders := generate(mix{count: n, refuse: m.refuse * n / m.count}, orderSeed, b.skus())
	t := b.trial(s, n)
	if err := s.rest(ctx); err != nil {
		return err
	}
	before, err := readCounts(counters)
	if err != nil {
		return err
	}
	if err := t.submit(ctx, orders); err != nil {
		return err
	}
	if err := t.awaitEnd(ctx); err != nil {
		return err
	}
	if _, err := b.check(ctx, t, orders); err != nil { // also waits until the relays have marked all
		return err
	}
	after, err := readCounts(counters)
	if err != nil {
		return err
	}
	work, err := s.work(ctx)
	if err != nil {
		return err
	}
	messages := float64(work.Done)
	b.result.Counted = n
	for role, counts := range after {
		for kind, k := range counts {
			sent := float64(k - before[role][kind])
			if sent == 0 {
				continue
			}
			b.result.Kinds = append(b.result.Kinds, statement{role, kind, sent / float64(n), sent / messages})
			if role == "worker" {
				b.result.PerMessage += sent / messages
			}
		}
	}
	slices.SortFunc(b.result.Kinds, func(x, y statement) int {
		return cmp.Or(strings.Compare(y.Process, x.Process), cmp.Compare(y.PerSaga, x.PerSaga), strings.Compare(x.Kind, y.Kind))
	})
	return nil
}

func readCounts(counters map[string]*bench.Statements) (map[string]map[string]int, error) {
	all := map[string]map[string]int{}
	for role, c := range counters {
		counts, err := c.Counts()
		if err != nil {
			return nil, err
		}
		all[role] = counts
	}
	return all, nil
}
