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
