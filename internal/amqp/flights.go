package amqp

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// flights is what collect knows of the messages in flight. No other goroutine uses it.
type flights struct {
	*confirmer
	pending  []flight // oldest first; those before head have their results
	head     int
	returned map[returnKey]returned
}

// returned are the returns of one key whose messages have no result yet.
type returned struct {
	count int
	why   string
}

// take adds what Publish has written since the last call.
func (f *flights) take() {
	if f.head > len(f.pending)/2 {
		n := copy(f.pending, f.pending[f.head:])
		clear(f.pending[n:])
		f.pending, f.head = f.pending[:n], 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending = append(f.pending, f.written...)
	clear(f.written)
	f.written = f.written[:0]
	f.idle = f.head == len(f.pending)
}

// oldest returns the confirm of the oldest message in flight, nil if there is none.
func (f *flights) oldest() *amqp091.DeferredConfirmation {
	if f.head == len(f.pending) {
		return nil
	}
	return f.pending[f.head].confirm
}

// settle gives results to the oldest messages, up to the first without a confirm. If it
// finds that the channel was closed it stops and returns why.
func (f *flights) settle() (e *amqp091.Error, closed bool) {
	end := f.head
	for end < len(f.pending) && isDone(&f.pending[end]) {
		end++
	}
	f.drainReturns() // after the confirms were seen, so those of these messages are there
	for ; f.head < end; f.head++ {
		if e, closed := f.give(&f.pending[f.head]); closed {
			return e, true
		}
	}
	return nil, false
}

// settleBehind gives results to messages behind one whose confirm is late.
func (f *flights) settleBehind() (e *amqp091.Error, closed bool) {
	rest := f.pending[f.head:]
	done := make([]bool, len(rest))
	for i := range rest {
		done[i] = isDone(&rest[i])
	}
	f.drainReturns()
	kept := rest[:0]
	for i := range rest {
		if done[i] && !closed {
			if e, closed = f.give(&rest[i]); !closed {
				continue
			}
		}
		kept = append(kept, rest[i])
	}
	f.pending = f.pending[:f.head+len(kept)]
	clear(rest[len(kept):])
	return e, closed
}

// give gives f, which has its confirm, a result. A negative confirm may also mean that the
// channel was closed; amqp091 tells that before it confirms, so it is known by now.
func (f *flights) give(fl *flight) (e *amqp091.Error, closed bool) {
	if fl.confirm.Acked() {
		f.giveAcked(fl)
		return nil, false
	}
	select {
	case e := <-f.closes:
		return e, true
	default:
	}
	f.result(fl, message.Nacked, "a queue is full or not available")
	return nil, false
}

// giveAcked gives an acked message its result. The broker sends a return before the ack of
// the same message and amqp091's one reader passes them on in that order, so the return, if
// any, has been drained since the ack was seen.
func (f *flights) giveAcked(fl *flight) {
	if fl.mandatory && len(f.returned) > 0 {
		if r, ok := f.returned[fl.key]; ok {
			if r.count--; r.count == 0 {
				delete(f.returned, fl.key)
			} else {
				f.returned[fl.key] = r
			}
			f.result(fl, message.Returned, r.why)
			return
		}
	}
	f.result(fl, message.Confirmed, "")
}

func (f *flights) result(fl *flight, kind message.ResultKind, why string) {
	if why != "" {
		why = fmt.Sprintf("exchange %q, routing key %q: %s", fl.key.exchange, fl.key.routingKey, why)
	}
	f.mu.Lock() // whoever takes the result may publish or release at once, and looks at both
	defer f.mu.Unlock()
	f.inFlight--
	f.results <- message.Result{Tag: fl.tag, Kind: kind, Reason: why} // has room: admit sees to it
}

func (f *flights) drainReturns() {
	for {
		select {
		case r, ok := <-f.returns:
			if !ok {
				return
			}
			k := newReturnKey(r.MessageId, r.Exchange, r.RoutingKey, r.Body)
			f.returned[k] = returned{f.returned[k].count + 1, fmt.Sprintf("returned: %d %s", r.ReplyCode, r.ReplyText)}
		default:
			return
		}
	}
}

// end gives the last results, after the channel was closed because of e.
func (f *flights) end(e *amqp091.Error) {
	outage := isOutage(e) || isCode(e, amqp091.InternalError) && !f.brokerServes()
	f.mu.Lock()
	f.gone = true // so nothing is written after this take
	f.mu.Unlock()
	f.take()

	rest := f.pending[f.head:]
	acked := make([]bool, len(rest))
	for i := range rest {
		acked[i] = rest[i].confirm.Acked()
	}
	f.drainReturns()
	blamed := false
	for i := range rest {
		blamed = blamed || !acked[i] && blames(e, rest[i].key.exchange)
	}
	for i := range rest {
		fl := &rest[i]
		if acked[i] {
			f.giveAcked(fl)
			continue
		}
		kind := message.Aborted
		switch {
		case blames(e, fl.key.exchange):
			kind = message.Returned
		case outage || blamed:
			kind = message.Lost
		}
		f.result(fl, kind, closeReason(e))
	}
}

// isOutage reports whether e says nothing against any message: we closed the channel, the
// connection was lost, or an operator or a shutdown closed it.
func isOutage(e *amqp091.Error) bool {
	return e == nil || !e.Server || e.Code == amqp091.ConnectionForced
}

// shutdownTest is how soon a broker that closed a connection over a message has taken the
// next one.
const shutdownTest = 3 * time.Second

// brokerServes tells the two meanings of 541 INTERNAL_ERROR apart: a message crashed its
// channel, or channels crash because the broker is shutting down. Then there is no next
// session for a while.
func (c *confirmer) brokerServes() bool {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTest)
	defer cancel()
	select {
	case <-c.session.Done():
	case <-ctx.Done():
		return true // it closed only the channel
	}
	_, err := c.client.Session(ctx)
	return err == nil
}

// blames reports whether e closed a channel because a message was published to this exchange,
// which is missing or forbidden. The broker names the exchange in the text of the reply,
// "NOT_FOUND - no exchange 'x' in vhost 'y'", and the default exchange as amq.default. A reply
// text has 255 bytes at most: the broker cuts it short, and ends it with dots, in the middle of
// a long name. Then what there is of the name must do.
func blames(e *amqp091.Error, exchange string) bool {
	if e == nil || !e.Server || e.Code != amqp091.NotFound && e.Code != amqp091.AccessRefused {
		return false
	}
	if exchange == "" {
		exchange = "amq.default"
	}
	return names(e.Reason, exchange) || !utf8.ValidString(exchange) && names(e.Reason, latin1(exchange))
}

func names(reason, exchange string) bool {
	name := exchange + "' in vhost"
	if strings.Contains(reason, "exchange '"+name) {
		return true
	}
	shown, cut := strings.CutSuffix(reason, "...")
	_, begin, named := strings.Cut(shown, "exchange '")
	return cut && named && strings.HasPrefix(name, begin)
}

// latin1 returns s as RabbitMQ 4 shows bytes that are no UTF-8: each for itself.
func latin1(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteRune(rune(s[i]))
	}
	return b.String()
}

func isDone(fl *flight) bool {
	select {
	case <-fl.confirm.Done():
		return true
	default:
		return false
	}
}
