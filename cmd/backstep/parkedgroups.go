package main

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"time"

	"backstep/internal/inbox"
)

// parkedGroup are the messages of one queue with one reason.
type parkedGroup struct {
	Queue   string    `json:"queue"`
	Reason  string    `json:"reason"` // without what differs from one message to the next
	Count   int       `json:"count"`
	Oldest  time.Time `json:"oldest,omitzero"`
	Newest  time.Time `json:"newest,omitzero"`
	Types   []string  `json:"types"`
	Example string    `json:"example"` // the id of the first
	Said    string    `json:"example_reason"`
}

// words is the reason as a person reads it: that of one message needs no stand-ins.
func (g *parkedGroup) words() string {
	if g.Count == 1 {
		return g.Said
	}
	return g.Reason
}

// What is kept of the groups, however many messages and reasons there are.
const (
	maxGroups     = 1000
	maxGroupTypes = 3
	otherReasons  = "other reasons, too many to tell them apart"
)

// parkedGroups counts messages by queue and reason.
type parkedGroups struct {
	all map[[2]string]*parkedGroup
}

func (g *parkedGroups) add(p *inbox.Parked) {
	if g.all == nil {
		g.all = map[[2]string]*parkedGroup{}
	}
	key := [2]string{p.Queue, alike(p.Reason)}
	if g.all[key] == nil && len(g.all) >= maxGroups {
		key[1] = otherReasons
	}
	group := g.all[key]
	if group == nil {
		group = &parkedGroup{Queue: p.Queue, Reason: key[1], Example: p.Name(), Said: p.Reason, Types: []string{}}
		g.all[key] = group
	}
	group.Count++
	if !p.At.IsZero() {
		if group.Oldest.IsZero() || p.At.Before(group.Oldest) {
			group.Oldest = p.At
		}
		if p.At.After(group.Newest) {
			group.Newest = p.At
		}
	}
	if len(group.Types) < maxGroupTypes && !slices.Contains(group.Types, p.Original.Type) {
		group.Types = append(group.Types, p.Original.Type)
	}
}

// list returns the groups: of each queue the largest first.
func (g *parkedGroups) list() []*parkedGroup {
	list := make([]*parkedGroup, 0, len(g.all))
	for _, group := range g.all {
		list = append(list, group)
	}
	slices.SortFunc(list, func(a, b *parkedGroup) int {
		return cmp.Or(strings.Compare(a.Queue, b.Queue), cmp.Compare(b.Count, a.Count), strings.Compare(a.Reason, b.Reason))
	})
	return list
}

// varying are parts of a reason that name one message of many, and what stands for them.
var varying = []struct {
	part  *regexp.Regexp
	stand string
}{
	{regexp.MustCompile(`"(?:[^"\\]|\\.)*"`), `"…"`},
	{regexp.MustCompile(`\b[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]+(?:Z|[+-][0-9]{2}:[0-9]{2})?`), "…"}, // times
	{regexp.MustCompile(`\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b`), "…"},             // UUIDs
	{regexp.MustCompile(`[0-9]+`), "N"},
}

// maxGroupReason is how much of a reason tells it from others.
const maxGroupReason = 300

// alike returns a reason without what differs from one message to the next: quoted texts, ids,
// times and numbers.
func alike(reason string) string {
	for _, v := range varying {
		reason = v.part.ReplaceAllLiteralString(reason, v.stand)
	}
	return clipText(reason, maxGroupReason)
}
