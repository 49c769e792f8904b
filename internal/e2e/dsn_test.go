package e2e

import (
	"strings"
	"testing"
	"time"
)

// TestDSNOptions: whatever a DSN says about sessions and times, the outcome of an order and
// every invariant are the same. What could change them is refused, see package sqltx. (B80: how
// many rows an UPDATE says it changed.)
func TestDSNOptions(t *testing.T) {
	w := newWheel(t)
	sep := "?"
	if strings.Contains(w.dsn, "?") {
		sep = "&" // the last of two wins
	}
	var total expectation
	for _, tt := range []struct{ options, env string }{
		{"parseTime=false", ""},
		{"loc=Local", "TZ=Asia/Kolkata"},
		{"multiStatements=true&interpolateParams=false", ""},
		{"clientFoundRows=true", "TZ=Pacific/Apia"},
		{"charset=latin1&collation=latin1_german1_ci&timeTruncate=1h&maxAllowedPacket=1000", ""},
	} {
		t.Run(tt.options, func(t *testing.T) {
			on := &wheel{t: t, dsn: w.dsn + sep + tt.options, db: w.db, broker: w.broker}
			procs := []*proc{on.start("relay", tt.env), on.start("worker", tt.env)}
			on.awaitQueues()
			msgs, want := orders(10)
			on.submit(msgs...)
			total.confirmed += want.confirmed
			total.noStock += want.noStock
			total.declined += want.declined
			total.refused += want.refused
			on.rest(total.total(), 60*time.Second)
			on.verify(total)
			if n := on.count(`SELECT COUNT(*) FROM orders WHERE ABS(TIMESTAMPDIFF(MINUTE, created_at, UTC_TIMESTAMP(6))) > 30`); n > 0 {
				t.Errorf("%d orders were made at another time than now", n)
			}
			stopAll(procs...)
		})
	}
}
