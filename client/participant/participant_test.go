package participant_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// hotels are the same participant in two languages.
var hotels = map[string]func(*testing.T) *hotel{"Go": goHotel, "Python": pythonHotel}

// The rules of docs/messages.md, "Taking part in a saga", in every order in which copies of the
// commands of a step can arrive (B83).
func TestBarrier(t *testing.T) {
	for language, open := range hotels {
		t.Run(language, func(t *testing.T) {
			h := open(t)
			h.listen()
			h.start()
			h.opens()

			t.Run("action, then compensation, each five times", func(t *testing.T) {
				h.t = t
				h.wants(h.ask(book("a"), 5, -1), "completed", "")
				h.wants(h.ask(cancel("a"), 5, +1), "completed", "")
				h.wants(h.ask(cancel("a").again(), 1, 0), "completed", "")
			})
			t.Run("compensation before its action", func(t *testing.T) {
				h.t = t
				h.wants(h.ask(cancel("b"), 5, 0), "completed", "")
				h.wants(h.ask(book("b"), 5, 0), "refused", "too late")
				h.wants(h.ask(cancel("b"), 1, 0), "completed", "")
			})
			t.Run("action after its compensation", func(t *testing.T) {
				h.t = t
				h.wants(h.ask(book("c"), 1, -1), "completed", "")
				h.wants(h.ask(cancel("c"), 1, +1), "completed", "")
				h.wants(h.ask(book("c").again(), 5, 0), "refused", "too late")
			})
			t.Run("a refused action has nothing to undo", func(t *testing.T) {
				h.t = t
				long := command{"d", "execute", 1, 100}
				h.wants(h.ask(long, 5, 0), "refused", "100 nights are too many")
				h.wants(h.ask(cancel("d"), 5, 0), "completed", "")
				h.wants(h.ask(book("d").again(), 5, 0), "refused", "too late")
			})
			t.Run("a refused action is tried again when the saga asks again", func(t *testing.T) {
				h.t = t
				long := command{"e", "execute", 1, 100}
				h.wants(h.ask(long, 1, 0), "refused", "too many")
				h.wants(h.ask(book("e").again(), 5, -1), "completed", "")
				h.wants(h.ask(cancel("e"), 1, +1), "completed", "")
			})
			t.Run("another attempt at what is done gets its answer", func(t *testing.T) {
				h.t = t
				first := h.ask(book("f"), 1, -1)
				second := h.ask(book("f").again(), 1, 0)
				h.wants(second, "completed", "")
				if first.rooms != second.rooms || first.id == second.id {
					t.Errorf("the answers: %+v, then %+v", first, second)
				}
			})
			t.Run("what is no command is parked", func(t *testing.T) {
				h.t = t
				parked, err := h.ch.Consume("hotel.parked", "", true, false, false, false, nil)
				h.must(err)
				for _, p := range noCommands() {
					h.send(p)
				}
				h.ask(book("g"), 1, -1)
				for i := range noCommands() {
					select {
					case <-parked:
					case <-time.After(30 * time.Second):
						t.Fatalf("%d of them are parked, want %d", i, len(noCommands()))
					}
				}
			})
		})
	}
}

// A command that is given back again and again is parked, on every broker, if its queue is as docs/messages.md
// asks for. That of the Python participant is: the broker would refuse to declare it in another way.
func TestGivenBackIsParked(t *testing.T) {
	h := newHotel(t)
	h.send(book("a").publishing())
	parked, err := h.ch.Consume("hotel.parked", "", true, false, false, false, nil)
	h.must(err)
	tries, err := h.ch.Consume("hotel", "", false, false, false, false, nil)
	h.must(err)
	for n := 0; ; {
		select {
		case d := <-tries:
			n++
			h.must(d.Reject(true))
			continue
		case d := <-parked:
			if n != 21 || d.MessageId != book("a").id() {
				t.Errorf("%s is parked after %d deliveries, want 21", d.MessageId, n)
			}
		case <-time.After(30 * time.Second):
			t.Errorf("not parked after %d deliveries", n)
		}
		return
	}
}

// again is another attempt of the saga's engine.
func (c command) again() command { c.attempt++; c.nights = 2; return c }

func (h *hotel) wants(got reply, status, reason string) {
	h.t.Helper()
	if got.status != status || !strings.Contains(got.err, reason) {
		h.t.Errorf("answer %+v, want %s %q", got, status, reason)
	}
}

// noCommands are messages that no redelivery makes commands.
func noCommands() (list []amqp091.Publishing) {
	for _, spoil := range []func(p *amqp091.Publishing){
		func(p *amqp091.Publishing) { p.Headers = nil },
		func(p *amqp091.Publishing) { p.MessageId = "" },
		func(p *amqp091.Publishing) { p.ReplyTo = "" },
		func(p *amqp091.Publishing) { delete(p.Headers, "x-saga-id") },
		func(p *amqp091.Publishing) { delete(p.Headers, "x-step") },
		func(p *amqp091.Publishing) { p.Headers["x-direction"] = "sideways" },
		func(p *amqp091.Publishing) { p.Body = []byte(`{"input":`) },
	} {
		p := book("spoilt").publishing()
		spoil(&p)
		list = append(list, p)
	}
	return list
}

// B83: action and compensation, copies of both, are in the hands of several participants at once.
// Whoever is first, nothing is booked in the end, and all answers say so.
func TestActionAndCompensationAtOnce(t *testing.T) {
	for language, open := range hotels {
		t.Run(language, func(t *testing.T) {
			h := open(t)
			h.listen()
			for range 3 {
				h.start()
			}
			h.opens()
			before := h.free()
			const sagas, copies = 60, 2
			for i := range sagas {
				saga := "saga " + strconv.Itoa(i)
				for range copies {
					h.send(book(saga).publishing())
					h.send(cancel(saga).publishing())
				}
			}
			late := 0
			answers := map[string]string{}
			for range 2 * copies * sagas {
				d := h.next()
				switch {
				case strings.Contains(string(d.Body), `too late`): // also to a copy of what was in time
					late++
				case strings.Contains(string(d.Body), `"failed"`) || strings.Contains(string(d.Body), `"refused"`):
					t.Errorf("answer to %s: %s", d.MessageId, d.Body)
				case answers[d.MessageId] != "" && answers[d.MessageId] != string(d.Body):
					t.Errorf("two answers to %s: %s and %s", d.MessageId, answers[d.MessageId], d.Body)
				default:
					answers[d.MessageId] = string(d.Body)
				}
			}
			if free := h.free(); free != before {
				t.Errorf("%d rooms are free, want %d", free, before)
			}
			for i := range sagas {
				if id := "re:" + cancel("saga "+strconv.Itoa(i)).id(); answers[id] == "" {
					t.Errorf("no compensation %s was answered", id)
				}
			}
			t.Logf("%d of %d actions came too late", late, copies*sagas)
		})
	}
}

// A participant dies between its commit and its reply, of an action and of a compensation: the next
// copy, or the one it has not acked, gets the answer, and the effect happens once.
func TestCrashBeforeTheReply(t *testing.T) {
	for language, open := range hotels {
		t.Run(language, func(t *testing.T) {
			h := open(t)
			ended := h.start()
			h.send(book("a").publishing())
			h.dies(ended)
			if free := h.free(); free != rooms-1 {
				t.Fatalf("%d rooms are free after an action without a reply, want %d", free, rooms-1)
			}
			h.send(cancel("a").publishing()) // behind the one that comes back
			h.listen()
			h.start()
			if d := h.next(); d.MessageId != "re:"+book("a").id() || !strings.Contains(string(d.Body), `"completed"`) {
				t.Errorf("first reply %s: %s", d.MessageId, d.Body)
			}
			if d := h.next(); d.MessageId != "re:"+cancel("a").id() || !strings.Contains(string(d.Body), `"completed"`) {
				t.Errorf("second reply %s: %s", d.MessageId, d.Body)
			}
			if free := h.free(); free != rooms {
				t.Errorf("%d rooms are free in the end, want %d", free, rooms)
			}
		})
	}
}

// dies waits until the participant has: what it cannot publish it does not survive.
func (h *hotel) dies(ended <-chan error) {
	h.t.Helper()
	select {
	case err := <-ended:
		h.t.Log("it died:", err)
	case <-time.After(20 * time.Second):
		h.t.Fatal("its reply has no queue, but it did not die")
	}
}
