package saga

import (
	"encoding/json"

	"backstep/internal/attempt"
)

// guarded calls f, and makes a panic in it an error. A lane does so for all that runs in it; but
// code of a definition also runs where nobody else does, and whose end would be every saga's: in
// keepers, in relays that park commands, and at operators'.
func guarded(f func() error) (err error) {
	attempt.Catch("panic", &err, f)
	return err
}

// decoded returns what JSON says. How a type reads it may be its own code.
func decoded[T any](b []byte) (v T, err error) {
	err = guarded(func() error { return json.Unmarshal(b, &v) })
	return v, err
}

// as returns an input as what the definition takes: that may be an interface, and the input nothing.
func as[In any](input any) (in In) {
	if input == nil {
		return in
	}
	return input.(In)
}
