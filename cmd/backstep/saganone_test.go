package main

import (
	"slices"
	"strings"
	"testing"
)

// TestFilterOfSagasThatMatchesNothing: that is said, where a program that reads the output is not disturbed by it, and is
// no failure: what was to be done has been.
func TestFilterOfSagasThatMatchesNothing(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	l.park(l.work(l.place("a"), 1), "gateway away")
	flags := map[string][]string{"retry": nil, "skip": {"--step", "charge-payment"}, "cancel": nil, "compensate": nil, "resolve": {"--as", "compensated"}}
	for verb, more := range flags {
		args := append([]string{"saga", verb, "--type", "place-order", "--error", "no such reason", "--reason", "x", "--actor", "ops"}, more...)
		const says, list = "nothing matched: no saga that is ", `"sagas": []`
		for _, run := range [][]string{args, slices.Concat(args, []string{"--dry-run"})} {
			a := l.run("", run...).want(exitOK, "MANUAL_ACTION fits these flags; backstep saga list")
			if !strings.HasPrefix(a.stderr, says) || !strings.HasPrefix(a.stdout, "0 sagas ") {
				t.Errorf("%s says %q, and %q", run, a.stdout, a.stderr)
			}
			var r runReport
			a = l.run("", slices.Concat(run, []string{"--json"})...).want(exitOK)
			if a.decode(&r); !strings.HasPrefix(a.stderr, says) || !strings.Contains(a.stdout, list) || len(r.Sagas) > 0 {
				t.Errorf("%s --json says %q, and %q", run, a.stdout, a.stderr)
			}
		}
		l.run("", "saga", verb, "--help").want(exitOK, "If none fits, that is said on standard error (--json: an empty list), and the exit code is 0")
	}
	l.run("", "saga", "retry", "--all", "--status", "RUNNING", "--reason", "x", "--actor", "ops").want(exitOK, "nothing matched: no saga that is RUNNING fits these flags")
	l.clear()
	l.run("", "saga", "resolve", "--all", "--as", "completed", "--reason", "x", "--actor", "ops").want(exitOK, "nothing matched: no saga that is MANUAL_ACTION is there")
	if a := l.run("", "saga", "retry", "nobody", "--reason", "x", "--actor", "ops").want(exitFailed); strings.Contains(a.stderr, "nothing matched") {
		t.Errorf("one that is named: %s", a.stderr) // it is an error of its own
	}
}
