package saga

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

func act(context.Context, *sqltx.Tx, trip) (booking, error) { return booking{}, nil }

func undo(context.Context, *sqltx.Tx, trip, booking) error { return nil }

func keys(trip) []string { return nil }

func take(context.Context, *sqltx.Tx, []string) error { return nil }

func TestDefinePanicsOnMistakes(t *testing.T) {
	ok := func(options ...StepOption) Part[trip] { return Step("a", "q", act, undo, options...) }
	long := strings.Repeat("x", 129)
	tests := []struct {
		name   string
		define func()
		want   string // "": no panic
	}{
		{"all is well", func() { Define("t", 1, ok(Retry(1, time.Second), Locks(keys, take)), Step("b", "q", act, nil)) }, ""},
		{"no type", func() { Define("", 1, ok()) }, "type"},
		{"type too long", func() { Define(long, 1, ok()) }, "type"},
		{"version 0", func() { Define("t", 0, ok()) }, "version"},
		{"no steps", func() { Define[trip]("t", 1) }, "step"}, // B96
		{"only hooks", func() { Define("t", 1, OnCompleted(func(context.Context, *sqltx.Tx, trip) error { return nil })) }, "step"},
		{"two of one name", func() { Define("t", 1, ok(), ok()) }, `"a"`},
		{"no name", func() { Define("t", 1, Step("", "q", act, undo)) }, "name"},
		{"name too long", func() { Define("t", 1, Step(long, "q", act, undo)) }, "name"},
		{"no queue", func() { Define("t", 1, Step("a", "", act, undo)) }, "queue"},
		{"no action", func() { Define("t", 1, Step[trip, booking]("a", "q", nil, undo)) }, "action"},
		{"no attempts", func() { Define("t", 1, ok(Retry(0, time.Second))) }, "attempt"},
		{"no back-off", func() { Define("t", 1, ok(Retry(3, 0))) }, "back-off"},
		{"the longest back-off", func() { Define("t", 1, ok(RetryCap(maxWait))) }, ""},
		{"a command that is too old when it comes", func() { Define("t", 1, ok(RetryCap(15*24*time.Hour))) }, "back-off of up to 360h"},
		{"locks without keys", func() { Define("t", 1, ok(Locks[trip](nil, take))) }, "Locks"},
		{"locks without take", func() { Define("t", 1, ok(Locks(keys, nil))) }, "Locks"},
		{"locks of another input", func() { Define("t", 1, ok(Locks(func(int) []string { return nil }, take))) }, "Locks"},
		{"hook that is nil", func() { Define("t", 1, ok(), OnCompleted[trip](nil)) }, "OnCompleted"},
		{"hook given twice", func() {
			f := func(context.Context, *sqltx.Tx, trip, string) error { return nil }
			Define("t", 1, ok(), OnCompensated(f), OnCompensated(f))
		}, "OnCompensated"},
		{"a name that ends with a blank", func() { Define("t", 1, Step("a ", "q", act, nil)) }, "begins or ends with a blank"},
		{"result JSON cannot say", func() {
			Define("t", 1, Step("a", "q", func(context.Context, *sqltx.Tx, trip) (chan int, error) { return nil, nil }, nil))
		}, "result"},
		{"two of one type and version", func() { NewEngine(slog.Default(), Define("t", 1, ok()), Define("t", 1, ok())) }, "t version 1"},
		{"two versions", func() { NewEngine(slog.Default(), Define("t", 1, ok()), Define("t", 2, ok())) }, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			defer func() {
				r := recover()
				if tt.want == "" {
					if r != nil {
						t.Errorf("panic: %v", r)
					}
					return
				}
				if r == nil || !strings.Contains(fmt.Sprint(r), tt.want) {
					t.Errorf("panic %v, want one about %q", r, tt.want)
				}
			}()
			tt.define()
		})
	}
}
