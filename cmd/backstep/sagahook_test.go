package main

import (
	"strings"
	"testing"

	"backstep/internal/saga"
)

// TestRunPastFailingHook: a saga whose hook fails does not keep the others from being done, nor is a way
// offered that fails by it.
func TestRunPastFailingHook(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	var ids []string
	for _, request := range []string{"a", "b", "c", "d"} {
		ids = append(ids, l.park(l.work(l.place(request), 1), "gateway away"))
	}
	d, err := saga.Get(t.Context(), l.db, ids[0]) // the oldest
	if err != nil {
		t.Fatal(err)
	}
	execute(t, l.db, "ALTER TABLE orders ADD CONSTRAINT ck_trial CHECK (status <> 'CANCELLED' OR id <> '"+d.CorrelationID+"')")
	const says = "a hook of its definition fails: "
	resolve := []string{"saga", "resolve", "--all", "--as", "compensated"}
	l.run("", append(resolve, "--dry-run")...).want(exitFailed, "saga "+ids[0]+" would be left as it is: "+says, "4 sagas chosen; nothing was done", "1 of 4 sagas would not be resolved")
	if shown := l.run("", "saga", "show", ids[0]).want(exitOK, "\n  resolve --as compensated: "+says).stdout; strings.Contains(shown, "backstep saga resolve") {
		t.Errorf("it offers what fails:\n%s", shown)
	}
	resolve = append(resolve, "--reason", "x", "--actor", "ops")
	l.run("", append(resolve, "--max-failures", "1")...).want(exitFailed, "saga "+ids[0]+": left as it is: "+says, "stopped after 1 failure (--max-failures 1); 3 sagas are left as they are")
	var r runReport
	l.run("", append(resolve, "--json")...).want(exitFailed, "not resolved, or failed since: 1 of 4 sagas: "+ids[0]).decode(&r)
	if r.Counts[fateFailed] != 1 || r.Counts[fateChanged] != 3 || r.Sagas[0].Fate != fateFailed {
		t.Errorf("%+v", r)
	}
	if got := l.statuses(); got != "3 COMPENSATED, 1 MANUAL_ACTION" {
		t.Errorf("sagas %s", got)
	}
	// What is not the saga's own matter ends the run.
	execute(t, l.db, "ALTER TABLE saga_actions RENAME COLUMN actor TO nobody")
	execute(t, l.db, "ALTER TABLE orders DROP CONSTRAINT ck_trial")
	l.run("", resolve...).want(exitFailed, "not finished: 0 of 1 sagas gone through")
}
