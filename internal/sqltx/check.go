package sqltx

import (
	"context"
	"fmt"
	"strings"
)

// Violation is one place where an invariant does not hold.
type Violation struct {
	Rule    string `json:"rule"`    // what should hold, in words
	Subject string `json:"subject"` // which order, saga, row, SKU
	Detail  string `json:"detail"`  // what is there instead
}

// Check runs a query for offenders, which gives a subject and a detail a row, and returns
// one Violation of rule for each.
func Check(ctx context.Context, q Querier, rule, query string, args ...any) ([]Violation, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("check %q: %w", rule, err)
	}
	defer rows.Close()
	var out []Violation
	for rows.Next() {
		var subject, detail []byte
		if err := rows.Scan(&subject, &detail); err != nil {
			return nil, fmt.Errorf("check %q: %w", rule, err)
		}
		out = append(out, Violation{
			Rule: rule, Subject: strings.ToValidUTF8(string(subject), "\uFFFD"), Detail: strings.ToValidUTF8(string(detail), "\uFFFD"),
		})
	}
	return out, rows.Err()
}

// Count runs a query that gives a key and a number a row, and returns the number of each key.
// what is counted, for errors: "orders".
func Count[K ~string](ctx context.Context, q Querier, what, query string) (map[K]int, error) {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return nil, fmt.Errorf("count %s: %w", what, err)
	}
	defer rows.Close()
	counts := map[K]int{}
	for rows.Next() {
		var key K
		var n int
		if err := rows.Scan(&key, &n); err != nil {
			return nil, fmt.Errorf("count %s: %w", what, err)
		}
		counts[key] = n
	}
	return counts, rows.Err()
}
