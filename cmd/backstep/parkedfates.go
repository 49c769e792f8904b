package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"backstep/internal/inbox"
)

// fate is what became of a parked message.
type fate string

const (
	fateReplayed fate = "replayed"
	fateDropped  fate = "dropped"
	fateDone     fate = "done"    // it had been processed, or somebody had done the same before
	fateKept     fate = "kept"    // it stays parked, and another copy goes its way
	fateRefused  fate = "refused" // it stays parked
	fateMissing  fate = "missing" // nobody knows of it
)

// fates in the order in which a person wants to read of them.
var fates = []fate{fateMissing, fateRefused, fateKept, fateDone, fateDropped, fateReplayed}

// parkedFate is what became of one message.
type parkedFate struct {
	ID     string `json:"id"`
	Queue  string `json:"queue,omitempty"`
	Fate   fate   `json:"fate"`
	Detail string `json:"detail"`

	messageID string
}

// parkedFates is what became of the messages that were chosen.
type parkedFates struct {
	list []parkedFate
	gone int  // of them are not parked any more, or would not be
	more bool // than were taken
	late bool // because the run has taken as long as it may
}

// maxFateDetail is how much is remembered of a reason, of maybe a hundred thousand.
const maxFateDetail = 300

func (f *parkedFates) add(p *inbox.Parked, what fate, detail string) {
	if what == fateReplayed || what == fateDropped || what == fateDone {
		f.gone++
	}
	f.list = append(f.list, parkedFate{p.Name(), p.Queue, what, clipText(detail, maxFateDetail), p.Original.MessageID})
}

func (f *parkedFates) addID(id, queue string, what fate, detail string) {
	f.list = append(f.list, parkedFate{ID: id, Queue: queue, Fate: what, Detail: detail})
}

func (f *parkedFates) count(what ...fate) (n int) {
	for _, x := range f.list {
		if slices.Contains(what, x.Fate) {
			n++
		}
	}
	return n
}

// without returns those of the ids of which nothing is known, nor can be if there were more.
func (f *parkedFates) without(ids []string) (rest []string) {
	if f.more {
		return nil
	}
	for _, id := range ids {
		if !slices.ContainsFunc(f.list, func(x parkedFate) bool { return x.ID == id || x.messageID == id }) {
			rest = append(rest, id)
		}
	}
	return rest
}

// leftOver says what keeps a verb from being done with all that was asked of it, though it ran to
// its end. What is to be said of ids is said of each.
func (f *parkedFates) leftOver(filter *parkedFilter, looks []look) error {
	switch {
	case f.more || len(filter.ids) > 0:
		return nil
	case held(looks):
		return errors.New("messages that others have in hand were not seen, and stay; run the same command again when the others are done")
	case len(f.list) == 0:
		return filter.matchesNothing()
	}
	return nil
}

// print says what became of the messages, in the verb's word if it was done.
func (f *parkedFates) print(cmd *cobra.Command, asJSON bool, done string, dryRun bool) error {
	counts := map[fate]int{}
	for _, x := range f.list {
		counts[x.Fate]++
	}
	if f.more {
		why := "than --max allows"
		if f.late {
			why = fmt.Sprintf("than a run of %s has time for", short(maxRun))
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "there are more %s; the same command goes on with them\n", why)
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), struct {
			Counts   map[fate]int `json:"counts"`
			More     bool         `json:"more"`
			DryRun   bool         `json:"dry_run,omitempty"`
			Messages []parkedFate `json:"messages"`
		}{counts, f.more, dryRun, append([]parkedFate{}, f.list...)})
	}
	out := cmd.OutOrStdout()
	words := map[fate]string{
		fateMissing: "not found", fateRefused: "left as it is", fateKept: "left as it is", fateDone: "done already",
		fateDropped: done, fateReplayed: done,
	}
	slices.SortStableFunc(f.list, func(a, b parkedFate) int {
		return cmp.Compare(slices.Index(fates, a.Fate), slices.Index(fates, b.Fate))
	})
	printFirst(out, f.list, "message", func(x *parkedFate) string {
		from := ""
		if x.Queue != "" {
			from = "from " + printable(x.Queue) + ", "
		}
		return fmt.Sprintf("%smessage %s: %s: %s", from, printable(x.ID), words[x.Fate], printable(x.Detail))
	})
	fmt.Fprintf(out, "%s %s", plural(counts[fateReplayed]+counts[fateDropped], "message"), done)
	if n := counts[fateDone]; n > 0 {
		fmt.Fprintf(out, ", %d done already", n)
	}
	if n := counts[fateKept] + counts[fateRefused] + counts[fateMissing]; n > 0 {
		fmt.Fprintf(out, ", %d not", n)
	}
	if dryRun {
		fmt.Fprint(out, "; nothing was done (--dry-run)")
	}
	fmt.Fprintln(out)
	return nil
}
