package app

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// unknown reports every variable that looks like ours and that no Backstep binary knows.
func unknown() error {
	var errs []error
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(canonical(name), Prefix+"_") || slices.Contains(Variables, name) || serviceLink(name) {
			continue
		}
		secret, isFile := strings.CutSuffix(name, "_FILE")
		switch {
		case isFile && slices.Contains(secrets, secret):
		case isFile && slices.Contains(Variables, secret):
			errs = append(errs, fmt.Errorf("%s is not a variable of Backstep; set %s itself, only what holds a password is read from a file", name, secret))
		default:
			errs = append(errs, fmt.Errorf("%s is not a variable of Backstep%s", name, didYouMean(name)))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// canonical is how we would spell a name.
func canonical(name string) string {
	return strings.NewReplacer("-", "_", ".", "_").Replace(strings.ToUpper(name))
}

// serviceLink reports whether a variable was set by Kubernetes, for a Service of the same
// namespace whose name begins with ours. A pod must start whatever Services there are.
func serviceLink(name string) bool {
	for _, suffix := range []string{"_SERVICE_", "_PORT"} {
		for at := range name {
			if strings.HasPrefix(name[at:], suffix) {
				if _, set := os.LookupEnv(name[:at] + "_SERVICE_HOST"); set {
					return true
				}
			}
		}
	}
	return false
}

// didYouMean names the variable that was probably meant.
func didYouMean(name string) string {
	name = canonical(name)
	best, least := "", 4 // two letters exchanged are two edits; one more is forgiven
	known := slices.Clone(Variables)
	for _, s := range secrets {
		known = append(known, s+"_FILE")
	}
	for _, v := range known {
		if d := edits(name, v); d < least {
			best, least = v, d
		}
	}
	for _, v := range Variables {
		own, other := strings.TrimPrefix(v, Prefix), strings.TrimPrefix(name, Prefix)
		if best == "" && (strings.HasSuffix(own, other) || strings.HasSuffix(other, own)) {
			best = v // a word too few or too many
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1) // distances of what of a was seen to each beginning of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
