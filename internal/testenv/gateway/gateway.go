package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"backstep/internal/message"
)

// Status is what became of a charge or a refund.
type Status string

// The statuses.
const (
	Charged  Status = "charged"
	Declined Status = "declined"
	Refunded Status = "refunded"
	Voided   Status = "voided" // of a charge that had not come
)

// Charge is one in the ledger.
type Charge struct {
	Key         string `json:"key"`
	ID          string `json:"id,omitempty"`
	Order       string `json:"order,omitempty"`
	AmountCents int64  `json:"amount_cents,omitempty"`
	Status      Status `json:"status"`
}

// Refund is one in the ledger.
type Refund struct {
	Key         string `json:"key"`
	ID          string `json:"id"`
	Order       string `json:"order"`
	AmountCents int64  `json:"amount_cents"`
	ChargeKey   string `json:"charge_key"`
	ChargeID    string `json:"charge_id,omitempty"`
	Status      Status `json:"status"`
}

// Ledger is everything that happened, in order.
type Ledger struct {
	Charges  []Charge `json:"charges"`
	Refunds  []Refund `json:"refunds"`
	Requests int      `json:"requests"` // to charge or refund, repeats included
}

// Gateway is the service. Its zero value is ready.
type Gateway struct {
	mu     sync.Mutex // guards below
	ledger Ledger
	faults []Fault // one at most
}

// ServeHTTP answers a request.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mux().ServeHTTP(w, r)
}

func (g *Gateway) mux() *http.ServeMux {
	m := http.NewServeMux()
	m.HandleFunc("POST /charges", func(w http.ResponseWriter, r *http.Request) { g.change(w, r, "charges", g.charge) })
	m.HandleFunc("POST /refunds", func(w http.ResponseWriter, r *http.Request) { g.change(w, r, "refunds", g.refund) })
	m.HandleFunc("GET /charges/{key}", g.find)
	m.HandleFunc("GET /ledger", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, g.Ledger()) })
	m.HandleFunc("POST /faults", g.setFault)
	return m
}

// Ledger returns the ledger as it is.
func (g *Gateway) Ledger() Ledger {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.ledger
	l.Charges, l.Refunds = slices.Clone(l.Charges), slices.Clone(l.Refunds)
	return l
}

// Forget loses the ledger, as the end of the process does.
func (g *Gateway) Forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ledger = Ledger{}
}

// request is the body of a charge or a refund.
type request struct {
	Order       string `json:"order"`
	AmountCents int64  `json:"amount_cents"`
	Token       string `json:"token"`
	ChargeKey   string `json:"charge_key"`
}

// change does what a request asks for, and what is to go wrong with it.
func (g *Gateway) change(w http.ResponseWriter, r *http.Request, what string, do func(key string, q request) (int, any)) {
	key := r.Header.Get("Idempotency-Key")
	var q request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&q); err != nil || key == "" {
		reply(w, http.StatusBadRequest, map[string]string{"error": fmt.Sprintf("no Idempotency-Key, or %v", err)})
		return
	}
	g.mu.Lock()
	g.ledger.Requests++
	f := g.next(what)
	g.mu.Unlock()
	if f.Kind == Slow {
		time.Sleep(f.Delay) // whoever asked may have gone meanwhile: it is done all the same
	}
	if f.Kind == FailBefore {
		reply(w, http.StatusInternalServerError, map[string]string{"error": "failed before it did anything"})
		return
	}
	if f.Kind == Decline {
		q.Token = "decline"
	}
	g.mu.Lock()
	status, body := do(key, q)
	g.mu.Unlock()
	switch f.Kind {
	case FailAfter:
		reply(w, http.StatusInternalServerError, map[string]string{"error": "failed, after it did it"})
	case CutAfter:
		panic(http.ErrAbortHandler) // the connection is closed without an answer
	default:
		reply(w, status, body)
	}
}

// charge is called with mu held.
func (g *Gateway) charge(key string, q request) (int, any) {
	c := g.charged(key)
	if c == nil {
		c = &Charge{Key: key, Order: q.Order, AmountCents: q.AmountCents, Status: Charged}
		if strings.HasPrefix(q.Token, "decline") {
			c.Status = Declined
		} else {
			c.ID = message.NewID() // unique, also when the ledger was lost with the process
		}
		g.ledger.Charges = append(g.ledger.Charges, *c)
	}
	if c.Status == Charged {
		return http.StatusCreated, c
	}
	return http.StatusPaymentRequired, c
}

func (g *Gateway) charged(key string) *Charge {
	for i := range g.ledger.Charges {
		if g.ledger.Charges[i].Key == key {
			return &g.ledger.Charges[i]
		}
	}
	return nil
}

// refund is called with mu held.
func (g *Gateway) refund(key string, q request) (int, any) {
	for _, r := range g.ledger.Refunds {
		if r.Key == key {
			return http.StatusCreated, r
		}
	}
	r := Refund{
		Key: key, ID: message.NewID(),
		Order: q.Order, AmountCents: q.AmountCents, ChargeKey: q.ChargeKey, Status: Voided,
	}
	if strings.HasPrefix(q.Token, "decline") {
		return http.StatusUnprocessableEntity, map[string]string{"status": string(Declined)}
	}
	switch c := g.charged(q.ChargeKey); {
	case c == nil:
		g.ledger.Charges = append(g.ledger.Charges, Charge{Key: q.ChargeKey, Status: Voided})
	case c.Status == Charged:
		r.Status, r.ChargeID, r.AmountCents = Refunded, c.ID, c.AmountCents
	}
	g.ledger.Refunds = append(g.ledger.Refunds, r)
	return http.StatusCreated, r
}

func (g *Gateway) find(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	var c Charge
	found := g.charged(r.PathValue("key"))
	if found != nil {
		c = *found
	}
	g.mu.Unlock()
	if found == nil {
		reply(w, http.StatusNotFound, map[string]string{"error": "no such charge"})
		return
	}
	reply(w, http.StatusOK, c)
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // who asked may have gone
}
