package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"
)

// Kind is a way to go wrong.
type Kind string

// The ways to go wrong.
const (
	Slow       Kind = "slow"        // it waits for Delay before it does anything
	FailBefore Kind = "fail-before" // 500, and nothing was done
	FailAfter  Kind = "fail-after"  // 500, and it was done
	CutAfter   Kind = "cut-after"   // it was done, and the connection is cut instead of an answer
	Decline    Kind = "decline"
)

// None is the end of what went wrong before, as is a Kind of "".
const None Kind = "none"

// Kinds are all of them.
var Kinds = []Kind{Slow, FailBefore, FailAfter, CutAfter, Decline}

// Meaning says what goes wrong, for a person to choose by.
func (k Kind) Meaning() string {
	switch k {
	case Slow:
		return "it waits for delay_ms before it does anything"
	case FailBefore:
		return "it answers 500, and has done nothing"
	case FailAfter:
		return "it answers 500, and has done it"
	case CutAfter:
		return "it has done it, and cuts the connection instead of answering"
	case Decline:
		return "it declines"
	}
	return "nothing goes wrong"
}

// maxDelay is longer than anybody waits for an answer.
const maxDelay = 10 * time.Minute

// Fault says what goes wrong, and how often.
type Fault struct {
	Kind  Kind
	On    string        // charges or refunds; "": both
	Times int           // how often; 0: always
	Delay time.Duration // Slow
}

// Break has f go wrong from now on, instead of what did before. A Kind of None or "" is the end of it.
func (g *Gateway) Break(f Fault) error {
	if f.Kind == None {
		f.Kind = ""
	}
	switch {
	case f.Kind != "" && !slices.Contains(Kinds, f.Kind):
		return fmt.Errorf("no fault %q; there are %v, and %s is the end of it", f.Kind, Kinds, None)
	case f.On != "" && f.On != "charges" && f.On != "refunds":
		return fmt.Errorf("faults are on charges, refunds or both, not on %q", f.On)
	case f.Times < 0:
		return fmt.Errorf("it cannot go wrong %d times; 0 is always", f.Times)
	case f.Kind == Slow && (f.Delay <= 0 || f.Delay > maxDelay):
		return fmt.Errorf("a slow one waits for 1 ms to %s, not for %s", maxDelay, f.Delay)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.faults = nil
	if f.Kind != "" {
		g.faults = []Fault{f}
	}
	return nil
}

// next returns what goes wrong with the next request; mu is held.
func (g *Gateway) next(what string) Fault {
	if len(g.faults) == 0 || g.faults[0].On != "" && g.faults[0].On != what {
		return Fault{}
	}
	f := g.faults[0]
	if f.Times == 1 {
		g.faults = nil
	} else if f.Times > 1 {
		g.faults[0].Times--
	}
	return f
}

func (g *Gateway) setFault(w http.ResponseWriter, r *http.Request) {
	f, err := decodeFault(http.MaxBytesReader(w, r.Body, 1<<20))
	if err == nil {
		err = g.Break(f)
	}
	if err != nil {
		reply(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// decodeFault reads what a person has typed: what it does not know it does not pass over, or a
// misspelt fault would be none.
func decodeFault(body io.Reader) (Fault, error) {
	var q struct {
		Fault   *Kind  `json:"fault"`
		On      string `json:"on"`
		Times   int    `json:"times"`
		DelayMS int64  `json:"delay_ms"`
	}
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		return Fault{}, fmt.Errorf(`%w; it takes one like {"fault": "slow", "on": "charges", "times": 3, "delay_ms": 2000}`, err)
	}
	switch {
	case !errors.Is(d.Decode(new(struct{})), io.EOF):
		return Fault{}, errors.New("there is more behind it; one fault holds at a time")
	case q.Fault == nil:
		return Fault{}, fmt.Errorf("it names no fault; there are %v, and %s is the end of it", Kinds, None)
	case q.DelayMS != 0 && *q.Fault != Slow:
		return Fault{}, fmt.Errorf("delay_ms is for %s alone, not for %q", Slow, *q.Fault)
	}
	// Beyond what a Duration holds is beyond maxDelay as well.
	return Fault{*q.Fault, q.On, q.Times, time.Duration(min(q.DelayMS, 2*maxDelay.Milliseconds())) * time.Millisecond}, nil
}
