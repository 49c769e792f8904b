package sagatest

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Plan is how Certify runs a saga.
type Plan struct {
	// Input is what every run starts with.
	Input any
	// Setup brings the tables of the domain to where a run begins, and registers participants.
	Setup func(w *World)
	// Check says what is wrong now that the saga has ended, COMPLETED or COMPENSATED.
	Check func(w *World, s saga.Detail) error
	// Pairs is how many runs with two faults there are at most; default 100.
	Pairs int
}

// Certify runs a saga without a fault, then with each fault at each place, then with two. It fails
// the test with the shortest schedule of those with the fewest faults after which
//
//   - the saga has not ended, or a message was parked, or
//   - Check says that something is wrong, or
//   - a function of a step has had its effect twice, or
//   - the saga has completed, but left another number of rows in the tables of the domain, or
//     other sums of their integers, than without the fault.
//
// What the definition itself leaves to an operator is not a fault: a business failure past the
// pivot or in a compensation, for example. db needs the schema of package migrations, the domain's
// tables, and nothing in use: the tables of the engine are emptied before each run.
func Certify(t testing.TB, db *sql.DB, d *saga.Definition, p Plan) {
	t.Helper()
	c := newCertifier(t, db, d, p)
	f := c.search()
	t.Logf("%s: %d runs", d.Type, c.runs)
	if f != nil {
		t.Errorf("%s", f)
	}
}

type certifier struct {
	t      testing.TB
	db     *sql.DB
	def    *saga.Definition
	plan   Plan
	tables []table
	clean  map[string]string // what is in them after a run without a fault
	runs   int
}

func newCertifier(t testing.TB, db *sql.DB, d *saga.Definition, p Plan) *certifier {
	t.Helper()
	if p.Setup == nil {
		p.Setup = func(*World) {}
	}
	if p.Check == nil {
		t.Fatal("sagatest: a Plan needs a Check: only its author knows what must not happen to the domain")
	}
	if p.Pairs == 0 {
		p.Pairs = 100
	}
	return &certifier{t: t, db: db, def: d, plan: p, tables: domainTables(t, db)}
}

// search returns the shortest schedule that fails, nil if none does.
func (c *certifier) search() *finding {
	c.t.Helper()
	bare := c.run()
	if f := bare.verdict(); f != nil {
		return f
	}
	if s := bare.w.Saga(bare.id); s.Status != saga.Completed {
		return &finding{saga: c.def.Type, log: bare.log, what: fmt.Sprintf(
			"the saga is %s: %s; give the Plan an Input, and a Setup, with which it completes, or little of it is run", s.Status, s.LastError)}
	}
	c.clean = contents(bare.w, c.tables)
	var pairs [][]fault
	found := c.shortest(lists(bare.faultsAfter(0)), func(r *run) {
		one := r.faults[0]
		for _, two := range r.faultsAfter(one.at) {
			pairs = append(pairs, []fault{one, two})
		}
	})
	if found != nil {
		return found
	}
	// The same ones each time, so that a failure can be looked into.
	random := rand.New(rand.NewPCG(1, 2))
	random.Shuffle(len(pairs), func(i, k int) { pairs[i], pairs[k] = pairs[k], pairs[i] })
	return c.shortest(pairs[:min(len(pairs), c.plan.Pairs)], func(*run) {})
}

// shortest runs schedules and returns the shortest of those that fail. Those that do not it hands
// to passed.
func (c *certifier) shortest(schedules [][]fault, passed func(r *run)) (best *finding) {
	c.t.Helper()
	others := -1
	for _, faults := range schedules {
		r := c.run(faults...)
		f := r.verdict()
		if f == nil {
			passed(r)
			continue
		}
		others++
		if best == nil || len(f.log) < len(best.log) {
			best = f
		}
	}
	if best != nil {
		best.others = others
	}
	return best
}

// run is one run of the saga with these faults.
func (c *certifier) run(faults ...fault) *run {
	c.t.Helper()
	c.runs++
	w := New(c.t, c.db, c.def)
	w.tx("empty the tables of the engine", func(ctx context.Context, tx *sqltx.Tx) error {
		for _, table := range engineTables {
			if _, err := tx.Exec(ctx, "DELETE FROM "+table); err != nil {
				return err
			}
		}
		return nil
	})
	c.plan.Setup(w)
	r := &run{certifier: c, w: w, faults: faults, standing: map[turn]kind{}}
	w.fail, w.unheard = r.outcome, r.heard
	r.id = w.Start(c.def, "certified", c.plan.Input)
	r.play()
	return r
}

func lists(faults []fault) [][]fault {
	out := make([][]fault, len(faults))
	for i, f := range faults {
		out[i] = []fault{f}
	}
	return out
}

// finding is a schedule that fails.
type finding struct {
	saga   string
	faults int
	log    []string // what was delivered, and what was done to it
	what   string   // what is wrong then
	others int      // schedules with as many faults that fail too
}

func (f *finding) String() string {
	with := [...]string{"without any fault", "with one fault", "with two faults"}[f.faults]
	var s strings.Builder
	fmt.Fprintf(&s, "saga %s is not right %s:\n", f.saga, with)
	for i, line := range f.log {
		fmt.Fprintf(&s, "%3d. %s\n", i+1, line)
	}
	s.WriteString("Then " + f.what)
	if f.others > 0 {
		fmt.Fprintf(&s, "\n(so it is in %d other runs %s; none of them is shorter)", f.others, with)
	}
	return s.String()
}
