package saga

import (
	"context"
	"errors"
	"fmt"

	"backstep/internal/sqltx"
)

// ErrNoResult means that an earlier step returned nothing: it was skipped, or has not completed.
var ErrNoResult = errors.New("saga: the step has no result")

// results reads what earlier steps of one saga returned, when they are asked for first.
type results struct {
	b      *batch
	in     *instance
	byStep map[int][]byte // nil: not read yet
}

// Served by the primary key.
const selectEarlierSQL = `
SELECT step_order, result
  FROM saga_steps
 WHERE saga_id = ?
   AND result IS NOT NULL`

// ResultOf returns what a step that came before the one ctx belongs to returned. ErrNoResult if
// it was skipped; that its compensation was does not matter. The first call for a saga costs a statement.
func ResultOf[R any](ctx context.Context, tx *sqltx.Tx, step string) (r R, err error) {
	c, _ := ctx.Value(callKey{}).(*call)
	if c == nil {
		panic("saga.ResultOf outside of a step or hook")
	}
	i := -1
	for k, s := range c.earlier.in.def.steps {
		if s.name == step {
			i = k
		}
	}
	if i < 0 {
		return r, Fail("saga.ResultOf: %s version %d has no step %q", c.earlier.in.typ, c.earlier.in.version, step)
	}
	b, err := c.earlier.of(ctx, tx, i)
	if err == nil {
		r, err = decoded[R](b)
	}
	if err != nil {
		return r, fmt.Errorf("result of step %s: %w", step, err)
	}
	return r, nil
}

func (r *results) of(ctx context.Context, tx *sqltx.Tx, step int) ([]byte, error) {
	if r.byStep == nil {
		if err := r.read(ctx, tx); err != nil {
			return nil, err
		}
	}
	b, ok := r.byStep[step]
	if !ok {
		return nil, ErrNoResult
	}
	return b, nil
}

func (r *results) read(ctx context.Context, tx *sqltx.Tx) error {
	rows, err := tx.Query(ctx, selectEarlierSQL, []byte(r.in.id))
	if err != nil {
		return err
	}
	defer rows.Close()
	found := map[int][]byte{}
	for rows.Next() {
		var i int
		var result []byte
		if err := rows.Scan(&i, &result); err != nil {
			return err
		}
		found[i] = result
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, s := range r.b.steps { // not written yet
		if s.sagaID == r.in.id && s.result != nil {
			found[s.order] = s.result
		}
	}
	r.byStep = found
	return nil
}
