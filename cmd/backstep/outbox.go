package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func newOutbox() *cobra.Command {
	cmd := group("outbox", "Look at outbox rows and repair them")
	cmd.Long = "A row is a message on its way from the database to the broker: PENDING, PUBLISHED, or PARKED\n" +
		"with the reason why a relay could not publish it. What these verbs change is audited."
	cmd.AddCommand(newOutboxRelays(), newOutboxStats(), newOutboxList(), newOutboxShow(),
		newOutboxRequeue(), newOutboxDrop(), newOutboxRepublish())
	return cmd
}

// operatorFlags say who changes rows, and why.
type operatorFlags struct {
	outbox.Operator
	dryRun bool
	asJSON bool
}

func (o *operatorFlags) add(cmd *cobra.Command, dryRun string) {
	cmd.Flags().StringVar(&o.Reason, "reason", "", "why; it is kept in the audit (needed)")
	cmd.Flags().StringVar(&o.Actor, "actor", "", "who, for the audit (default "+self()+")")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, dryRun)
	cmd.Flags().BoolVar(&o.asJSON, "json", false, "print what was done as JSON")
}

func (o *operatorFlags) check() error {
	if o.Actor == "" {
		o.Actor = self()
	}
	if strings.TrimSpace(o.Reason) == "" && !o.dryRun {
		return usagef("--reason is needed: say why, for those who read the audit later; --dry-run shows what would be done")
	}
	return nil
}

// self is who runs this process: user@host.
func self() string {
	name := "uid " + strconv.Itoa(os.Getuid())
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	return name + "@" + host
}

// resolveRows returns the rows that a person names, each once, or all the names that name none.
func resolveRows(ctx context.Context, q sqltx.Querier, names []string) ([]uint64, error) {
	var ids []uint64
	var faults []error
	for _, name := range names {
		found, err := outbox.Resolve(ctx, q, name)
		if errors.Is(err, outbox.ErrNoRow) {
			err = noRow(ctx, q, name)
		}
		if err != nil {
			faults = append(faults, err)
		}
		for _, id := range found {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	return ids, errors.Join(faults...)
}

// noRow says what became of a row or message that is not in the outbox.
func noRow(ctx context.Context, q sqltx.Querier, name string) error {
	actions, err := pastActions(ctx, q, name)
	if err != nil {
		return err
	}
	if n := len(actions); n > 0 && actions[n-1].Action == "drop" {
		a := actions[n-1]
		return fmt.Errorf("row %d, message %q, was dropped by %s at %s UTC: %s", a.RowID, a.MessageID, a.Actor, clock(a.At), a.Reason)
	}
	places, err := outbox.Find(ctx, q, name)
	if err != nil {
		return err
	}
	for _, p := range places { // of the outbox there is none
		return fmt.Errorf("message %q is scheduled: it becomes an outbox row in %s, to exchange %q, routing key %q, because: %s",
			name, short(-p.Age), p.Exchange, p.RoutingKey, p.LastError)
	}
	return fmt.Errorf("no outbox row has the id or the message id %q: it was never there, or was published and swept; "+
		"backstep outbox list shows the rows there are", name)
}

// pastActions returns what was done to the rows of that id or message id.
func pastActions(ctx context.Context, q sqltx.Querier, name string) ([]outbox.Action, error) {
	if id, err := strconv.ParseUint(name, 10, 64); err == nil {
		if actions, err := outbox.Actions(ctx, q, id); err != nil || len(actions) > 0 {
			return actions, err
		}
	}
	return outbox.ActionsOn(ctx, q, name)
}

// itemTable prints rows at a glance.
func itemTable(cmd *cobra.Command, items []outbox.Item) {
	t := newTable("row", "message id", "type", "key", "to", "status", "attempts", "age", "last error")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("message id", 40), wrapAt("key", 40)})
	for i := range items {
		it := &items[i]
		attempts := ""
		if it.Attempts > 0 {
			attempts = strconv.Itoa(it.Attempts)
		}
		t.AppendRow([]any{it.ID, printable(it.MessageID), printable(it.Type), printable(it.Key), printable(it.Exchange + " " + it.RoutingKey),
			it.Status, attempts, short(it.Age), reasonCell(it.LastError)})
	}
	render(cmd.OutOrStdout(), t)
}

// printable is a text from outside as a terminal may see it: what could steer it is escaped.
func printable(s string) string {
	clean := func(r rune) bool { return unicode.IsPrint(r) || r == '\n' }
	if strings.IndexFunc(s, func(r rune) bool { return !clean(r) || r == unicode.ReplacementChar }) < 0 {
		return s
	}
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == unicode.ReplacementChar && !strings.HasPrefix(s[i:], string(unicode.ReplacementChar)):
			fmt.Fprintf(&b, "\\x%02x", s[i])
		case clean(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// clipText cuts a text to about n bytes.
func clipText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + " …"
}

// quote is a text as a shell takes it for one word.
func quote(s string) string {
	plain := func(r rune) bool {
		return r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("-_.:/@", r))
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
