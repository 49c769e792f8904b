package sqltx_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"backstep/internal/sqltx"
)

// B66: each number comes out of a transaction with its class, whatever the driver makes of it, and
// after those that end a transaction no other statement is sent.
func TestNumbersFromTheServer(t *testing.T) {
	db := open(t)
	want := maps.Clone(sqltx.Classes)
	const unknown = 3024 // ER_QUERY_TIMEOUT, and whatever else comes one day
	want[unknown] = sqltx.Other
	for number, class := range want {
		t.Run(fmt.Sprint(number), func(t *testing.T) {
			_ = sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
				_, err := tx.Exec(ctx, fmt.Sprintf(`SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = %d`, number))
				got := sqltx.Classify(err)
				if got == sqltx.Lost && class == sqltx.ReadOnly {
					got = class // the driver takes it for a lost connection, so as to drop it
				}
				if got != class {
					t.Errorf("%v is of class %s, want %s", err, got, class)
				}
				ends := class == sqltx.Conflict || class == sqltx.Lost || class == sqltx.ReadOnly || class == sqltx.Full
				if (tx.Err() != nil) != ends {
					t.Errorf("the transaction has ended with %v; it ends for class %s: %t", tx.Err(), class, ends)
				}
				return err
			})
		})
	}
}

// The documented table has the numbers that the code has.
func TestNumbersAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| ([a-z-]+) \| ([0-9, ]+) \|`)
	documented := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		for n := range strings.SplitSeq(m[2], ", ") {
			documented[n] = m[1]
		}
	}
	code := map[string]string{}
	for n, class := range sqltx.Classes {
		code[strconv.Itoa(int(n))] = class.String()
	}
	if !maps.Equal(documented, code) {
		t.Errorf("documented: %v\nin the code: %v", documented, code)
	}
}
