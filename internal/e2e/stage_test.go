package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// stage is a relay that goes through one trouble after the other and is never restarted. It
// connects as a user of its own, whose rights can be taken away.
type stage struct {
	*wheel
	servers *testenv.Servers
	user    string // URL
	relay   *proc

	other     *proc     // relay
	signalled time.Time // to end
	elsewhere *wheel    // on the same broker

	mu    sync.Mutex                 // guards taken
	taken map[string]map[string]bool // ids that consumers have, by queue
}

// newStage starts a relay, by way of a wire if there is one, and declares queues that are bound
// to the commands.
func newStage(t *testing.T, servers *testenv.Servers, queues []string, by *wire, env ...string) *stage {
	t.Helper()
	w := wheelOn(t, servers)
	s := &stage{wheel: w, servers: servers, user: w.broker.User(t, ".*", ".*", ".*")}
	u, err := url.Parse(s.user)
	if err != nil {
		t.Fatal(err)
	}
	if by != nil {
		u.Host = by.address
	}
	s.relay = w.start("relay", append([]string{"BACKSTEP_AMQP_URL=" + u.String()}, env...)...)
	w.awaitQueues()
	for _, q := range queues {
		w.sink(q)
	}
	return s
}

func (s *stage) userName() string {
	u, err := url.Parse(s.user)
	if err != nil {
		s.t.Fatal(err)
	}
	return u.User.Username()
}

// planted is an outbox row as a writer in another language plants it: nobody has checked it.
type planted struct {
	id, exchange, key   string
	properties, headers string // empty: {}
	body                []byte
}

func rows(prefix string, n int, exchange, key string) []planted {
	all := make([]planted, n)
	for i := range all {
		all[i] = planted{id: fmt.Sprintf("%s-%d", prefix, i), exchange: exchange, key: key}
	}
	return all
}

// commands are rows to a queue that takes them.
func commands(prefix string, n int, queue string) []planted {
	return rows(prefix, n, message.CommandsExchange, queue)
}

const plantSQL = `
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload) VALUES `

// plant adds rows, in one transaction.
func (s *stage) plant(all ...planted) {
	s.t.Helper()
	tx, err := s.db.BeginTx(s.t.Context(), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	for len(all) > 0 {
		n := 1
		for size := 0; n < len(all) && n < 100 && size+len(all[n].body) < maxBody; n++ { // in one packet
			size += len(all[n].body)
		}
		some := all[:n]
		all = all[n:]
		var args []any
		for _, r := range some {
			object := func(text string) []byte { return []byte(cmp.Or(text, "{}")) }
			args = append(args, []byte(r.id), []byte(r.id), []byte(r.exchange), []byte(r.key),
				object(r.properties), object(r.headers), append([]byte{}, r.body...))
		}
		values := strings.TrimSuffix(strings.Repeat("(?, ?, ?, ?, ?, ?, ?), ", len(some)), ", ")
		if _, err := tx.ExecContext(s.t.Context(), plantSQL+values, args...); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		s.t.Fatal(err)
	}
}

// state of some rows.
type state struct {
	pending, published, parked int
	charged                    int // that were refused at least once
	latest                     float64
}

// of returns the state of the rows whose id begins with prefix.
func (s *stage) of(prefix string) (st state) {
	s.t.Helper()
	err := s.db.QueryRowContext(s.t.Context(), `
SELECT COALESCE(SUM(status = 'PENDING'), 0), COALESCE(SUM(status = 'PUBLISHED'), 0), COALESCE(SUM(status = 'PARKED'), 0),
       COALESCE(SUM(attempts > 0), 0), COALESCE(MAX(TIMESTAMPDIFF(MICROSECOND, created_at, published_at)), 0) / 1000000
  FROM outbox_events
 WHERE message_id LIKE CONCAT(?, '-%')`, []byte(prefix)).Scan(&st.pending, &st.published, &st.parked, &st.charged, &st.latest)
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

// reasons returns the different reasons that rows have.
func (s *stage) reasons(prefix string) (all []string) {
	s.t.Helper()
	rs, err := s.db.QueryContext(s.t.Context(), `
SELECT DISTINCT last_error FROM outbox_events WHERE message_id LIKE CONCAT(?, '-%') AND last_error IS NOT NULL`, []byte(prefix))
	if err != nil {
		s.t.Fatal(err)
	}
	defer rs.Close()
	for rs.Next() {
		var reason string
		if err := rs.Scan(&reason); err != nil {
			s.t.Fatal(err)
		}
		all = append(all, reason)
	}
	if err := rs.Err(); err != nil {
		s.t.Fatal(err)
	}
	return all
}

// published waits until n rows are.
func (s *stage) published(within time.Duration, prefix string, n int) {
	s.t.Helper()
	s.eventually(within, fmt.Sprintf("%d rows %s are published", n, prefix), func() error {
		if st := s.of(prefix); st.published != n {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// arrived takes all messages off a queue and demands that there is at least one copy of each
// row, and nothing else.
func (s *stage) arrived(queue string, want ...[]planted) {
	s.t.Helper()
	missing := map[string]bool{}
	for _, some := range want {
		for _, r := range some {
			missing[r.id] = true
		}
	}
	wanted := len(missing)
	s.mu.Lock()
	seen := maps.Clone(s.taken[queue])
	s.mu.Unlock()
	if seen == nil {
		seen = s.get(queue)
	}
	for id := range seen {
		if !missing[id] {
			s.t.Errorf("queue %s: %q arrived, which nobody sent there", queue, id)
		}
		delete(missing, id)
	}
	if len(missing) > 0 {
		s.t.Errorf("queue %s: %d of %d rows did not arrive, such as %v", queue, len(missing), wanted, anyOf(missing))
	}
}

func anyOf(set map[string]bool) string {
	for id := range set {
		return id
	}
	return ""
}

// get takes all messages off a queue.
func (s *stage) get(queue string) map[string]bool {
	s.t.Helper()
	seen := map[string]bool{}
	s.onChannel(func(ch *amqp091.Channel) error {
		for {
			d, ok, err := ch.Get(queue, true)
			if err != nil || !ok {
				return err
			}
			seen[d.MessageId] = true
		}
	})
	return seen
}

// consume takes what comes off a queue, until the test ends.
func (s *stage) consume(queue string) {
	s.t.Helper()
	conn, err := amqp091.Dial(s.broker.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	deliveries, err := ch.Consume(queue, "", true, false, false, false, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	taken := map[string]bool{}
	s.mu.Lock()
	s.taken = map[string]map[string]bool{queue: taken}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for d := range deliveries {
			s.mu.Lock()
			taken[d.MessageId] = true
			s.mu.Unlock()
		}
	}()
	s.t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
}

// onChannel runs use with a channel of a connection of its own.
func (s *stage) onChannel(use func(*amqp091.Channel) error) {
	s.t.Helper()
	conn, err := amqp091.Dial(s.broker.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := use(ch); err != nil {
		s.t.Fatal(err)
	}
}

// ctl runs rabbitmqctl and returns what it printed.
func (s *stage) ctl(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	out, err := s.servers.Rabbitmqctl(ctx, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// lives demands that the relay was never restarted, and has not ended.
func (s *stage) lives() {
	s.t.Helper()
	select {
	case <-s.relay.done:
		s.t.Fatalf("the relay ended: %v", s.relay.err)
	default:
	}
}

// run runs the CLI to its end.
func (s *stage) run(args ...string) *proc {
	s.t.Helper()
	p := s.startArgs("backstep", args)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		s.t.Fatalf("%v did not end", args)
	}
	return p
}

// cpu returns which share of one processor the process uses for a while.
func (p *proc) cpu(during time.Duration) float64 {
	p.t.Helper()
	ticks := func() int {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		if err != nil {
			p.t.Fatal(err)
		}
		// Behind the name, which may hold blanks: state is field 3, utime and stime 14 and 15.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		user, err1 := strconv.Atoi(fields[11])
		system, err2 := strconv.Atoi(fields[12])
		if err := errors.Join(err1, err2); err != nil {
			p.t.Fatal(err)
		}
		return user + system
	}
	before := ticks()
	time.Sleep(during)    // it is measured over this time
	const perSecond = 100 // USER_HZ, the same on every Linux
	return float64(ticks()-before) / perSecond / during.Seconds()
}

// ready returns what keeps a process from its work, as /readyz has it, or nil.
func (p *proc) ready() error {
	p.t.Helper()
	addr, err := p.admin()
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+addr+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	text, err := io.ReadAll(resp.Body)
	return errors.Join(err, errors.New(strings.TrimSpace(string(text))))
}

// says demands that the process is not ready, and says why.
func (p *proc) says(why string) error {
	p.t.Helper()
	err := p.ready()
	if err != nil && strings.Contains(err.Error(), why) {
		return nil
	}
	return fmt.Errorf("/readyz does not say %q: %w", why, cmp.Or(err, errors.New("it is ready")))
}
