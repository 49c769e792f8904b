package sqltx

import "context"

// maxInsertBytes splits one multi-row INSERT well below MariaDB's max_allowed_packet (16 MiB
// by default).
const maxInsertBytes = 4 << 20

// Insert collects rows for one statement, or a few if they are large.
type Insert struct {
	Head  string // INSERT INTO t (…) VALUES
	Tuple string // one row's, such as (?, ?)
	Tail  string // ON DUPLICATE KEY …

	statements []statement
}

type statement struct {
	args        []any
	rows, bytes int
}

// Append adds a row: the values of one tuple.
func (in *Insert) Append(args ...any) {
	n := 0
	for _, a := range args {
		switch v := a.(type) {
		case []byte:
			n += len(v)
		case string:
			n += len(v)
		default:
			n += 8
		}
	}
	if k := len(in.statements); k == 0 || in.statements[k-1].bytes+n > maxInsertBytes {
		in.statements = append(in.statements, statement{})
	}
	st := &in.statements[len(in.statements)-1]
	st.args = append(st.args, args...)
	st.rows++
	st.bytes += n
}

// Exec runs what was collected, which may be nothing.
func (in *Insert) Exec(ctx context.Context, tx *Tx) error {
	for _, st := range in.statements {
		if _, err := tx.Exec(ctx, in.Head+" "+repeat(in.Tuple, st.rows)+in.Tail, st.args...); err != nil {
			return err
		}
	}
	return nil
}
