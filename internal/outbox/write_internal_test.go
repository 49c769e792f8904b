package outbox

import (
	"testing"
	"time"
)

// Marks wait for company, but not for long, and not when something else is to be written.
func TestMarksWaitForEachOther(t *testing.T) {
	var w toWrite
	before := time.Now()
	w.confirm(&row{})
	first := w.due()
	if first.Before(before.Add(markWait)) || first.After(time.Now().Add(markWait)) {
		t.Errorf("one row is marked %s after it was confirmed, want %s", first.Sub(before), markWait)
	}
	for range markRows - 2 {
		w.confirm(&row{})
	}
	if got := w.due(); !got.Equal(first) {
		t.Errorf("later rows move the mark of the first by %s", got.Sub(first))
	}
	full := w
	full.confirm(&row{})
	refused := w
	refused.refuse(&row{}, "no queue", time.Second)
	for what, w := range map[string]toWrite{"enough rows": full, "a refusal": refused} {
		if got := w.due(); got.After(time.Now()) {
			t.Errorf("with %s it is written in %s, want at once", what, time.Until(got))
		}
	}
}
