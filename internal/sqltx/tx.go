package sqltx

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Querier is what a read needs: a *sql.DB or, inside a transaction, Tx.Querier.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Tx is a transaction as the code inside it sees it: no Commit, no Rollback. Once the server
// has ended the transaction (a deadlock) or the connection is gone, every statement is
// refused with ErrEnded, because it would otherwise run, and commit, by itself. Not safe for
// concurrent use.
type Tx struct {
	tx     *sql.Tx
	conn   *sql.Conn // its own; nil if the transaction is a caller's
	err    error     // the first error that ended it or makes it unusable
	writes []Write

	depth   int          // of savepoints that are open
	pending []*Savepoint // open, and not sent yet
}

// Write is one statement that wrote.
type Write struct {
	Query    string
	Affected int64 // -1: the driver did not say
}

// Join wraps a caller's own transaction, so that outbox.Add and saga.Start can be part of it.
func Join(tx *sql.Tx) *Tx { return &Tx{tx: tx} }

// Err returns the error that ended the transaction, or nil while it is alive.
func (t *Tx) Err() error { return t.err }

// Fail ends the transaction from the inside: every later statement is refused, and it is
// rolled back instead of committed.
func (t *Tx) Fail(err error) {
	if t.err == nil {
		t.err = err
	}
}

// Abandon rolls the transaction back while the code inside it still runs and will not end. What
// that code still does is refused. Unlike everything else here it is for another goroutine to
// call. A statement that runs ends first.
func (t *Tx) Abandon() {
	_ = t.tx.Rollback() // ended already, or the connection is gone and the server does it
	_ = t.conn.Close()  // likewise; else the pool would be short of it for ever
}

// Writes returns the statements that wrote so far, in order; those of a rolled back
// savepoint included.
func (t *Tx) Writes() []Write { return t.writes }

// Exec runs a statement that writes. If a savepoint is pending it is set first.
func (t *Tx) Exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	res, err := t.tx.ExecContext(ctx, query, args...)
	if err != nil {
		return nil, t.observe(err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		n = -1
	}
	t.writes = append(t.writes, Write{Query: query, Affected: n})
	return res, nil
}

// Query runs a statement that reads, FOR UPDATE included.
func (t *Tx) Query(ctx context.Context, query string, args ...any) (*Rows, error) {
	if t.err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEnded, t.err)
	}
	rows, err := t.tx.QueryContext(ctx, query, args...) //nolint:rowserrcheck // the caller does, on our Rows
	if err != nil {
		return nil, t.observe(err)
	}
	return &Rows{Rows: rows, tx: t}, nil
}

// QueryRow runs a statement that reads one row into dest. sql.ErrNoRows if there is none.
func (t *Tx) QueryRow(ctx context.Context, query string, args []any, dest ...any) error {
	if t.err != nil {
		return fmt.Errorf("%w: %w", ErrEnded, t.err)
	}
	return t.observe(t.tx.QueryRowContext(ctx, query, args...).Scan(dest...))
}

// Rows is sql.Rows that tells its transaction of errors, so that a deadlock which arrives
// with the rows is not missed.
type Rows struct {
	*sql.Rows
	tx *Tx
}

// Err returns the error, if any, that ended the iteration.
func (r *Rows) Err() error { return r.tx.observe(r.Rows.Err()) }

// begin refuses a dead transaction and sets the savepoints that were asked for.
func (t *Tx) begin(ctx context.Context) error {
	if t.err != nil {
		return fmt.Errorf("%w: %w", ErrEnded, t.err)
	}
	for len(t.pending) > 0 {
		s := t.pending[0]
		t.pending = t.pending[1:]
		if _, err := t.tx.ExecContext(ctx, "SAVEPOINT "+s.name()); err != nil {
			t.Fail(err)
			return err
		}
		s.sent = true
	}
	return nil
}

// observe remembers an error after which the transaction cannot go on.
func (t *Tx) observe(err error) error {
	switch Classify(err) {
	case Conflict, Lost, ReadOnly, Full, Canceled:
		// 1205 leaves the transaction open with half of a step in it (innodb_rollback_on_timeout
		// is off by default); ending it here is what keeps that half from being committed.
		if t.err == nil {
			t.err = err
		}
	}
	return err
}

// Savepoint marks a place to return to. The statement is sent only before the first write
// after it, so a step that writes nothing costs no round trip. They nest; end each with
// Rollback or Release, the inner ones first.
func (t *Tx) Savepoint() *Savepoint {
	t.depth++
	s := &Savepoint{tx: t, depth: t.depth}
	t.pending = append(t.pending, s)
	return s
}

// Savepoint is a place in a transaction.
type Savepoint struct {
	tx    *Tx
	depth int
	sent  bool
}

// name is by depth: the server replaces a savepoint of the same name, so those that follow
// each other cost it no memory.
func (s *Savepoint) name() string { return fmt.Sprintf("s%d", s.depth) }

// close ends s and, if they were forgotten, those within it.
func (s *Savepoint) close() {
	s.tx.depth = s.depth - 1
	s.tx.pending = slices.DeleteFunc(s.tx.pending, func(p *Savepoint) bool { return p.depth >= s.depth })
}

// Rollback undoes what was written since the savepoint. If it fails the transaction is over:
// nobody knows what is left of the writes.
func (s *Savepoint) Rollback(ctx context.Context) error {
	t := s.tx
	if t.err != nil {
		return fmt.Errorf("%w: %w", ErrEnded, t.err)
	}
	s.close()
	if !s.sent {
		return nil // nothing was written since
	}
	if _, err := t.tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT "+s.name()); err != nil {
		t.Fail(err)
		return err
	}
	return nil
}

// Release keeps what was written since the savepoint. It costs no statement: the next one of
// its name replaces it, and COMMIT forgets it.
func (s *Savepoint) Release() { s.close() }

var (
	target = regexp.MustCompile("(?is)^\\s*(INSERT(?:\\s+IGNORE)?\\s+INTO|UPDATE|DELETE\\s+FROM|REPLACE\\s+INTO)\\s+`?([a-z0-9_]+)")
	// Of a statement that joins values, which come first, to the table it writes.
	joined = regexp.MustCompile("(?is)^\\s*(?:UPDATE\\s*\\(|DELETE\\s).*?STRAIGHT_JOIN\\s+`?([a-z0-9_]+)")
)

// Verb and Table name what the statement did and to which table, for people.
func (w Write) Verb() string {
	verb, _, _ := strings.Cut(strings.ToUpper(strings.TrimSpace(w.Query)), " ")
	return strings.TrimSpace(verb)
}

// Table returns the table the statement wrote, or "" if the statement does not say at once.
func (w Write) Table() string {
	if m := target.FindStringSubmatch(w.Query); m != nil {
		return m[2]
	}
	if m := joined.FindStringSubmatch(w.Query); m != nil {
		return m[1]
	}
	return ""
}
