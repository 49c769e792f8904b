package handlers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"backstep/internal/saga"
)

// Gateway is a payment service that speaks HTTP (docs/operations.md). Every request has an
// Idempotency-Key; what it answers is decided by that key alone, however often it is asked.
type Gateway struct {
	root   *url.URL
	client http.Client
}

// gatewayTimeout is how long one request may take, less than a lane gives the whole call.
const gatewayTimeout = 10 * time.Second

// NewGateway returns the gateway at a URL such as http://payments:8080/v1. It does not connect.
func NewGateway(raw string) (*Gateway, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("it must read http(s)://host:port/path, with no user and nothing behind the path")
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 32 // as many as a lane makes calls at a time
	return &Gateway{u, http.Client{Timeout: gatewayTimeout, Transport: transport}}, nil
}

// gatewayRequest is the body of a request to charge or refund.
type gatewayRequest struct {
	Order       string `json:"order"`
	AmountCents int64  `json:"amount_cents"`
	Token       string `json:"token,omitempty"`
	ChargeKey   string `json:"charge_key,omitempty"` // of the charge that is to be refunded
}

// gatewayAnswer is what the gateway says about a charge or a refund.
type gatewayAnswer struct {
	ID       string `json:"id"`
	Status   string `json:"status"`
	ChargeID string `json:"charge_id"` // of the charge that was refunded
	Error    string `json:"error"`
}

const (
	gatewayCharged  = "charged"
	gatewayRefunded = "refunded"
	gatewayVoided   = "voided" // it knew of no such charge, and will decline it if it comes
)

// charge has an order's total charged. A second call first asks what became of the first.
func (g *Gateway) charge(ctx context.Context, info saga.Info, o Order) (Payment, error) {
	key := info.IdempotencyKey()
	if info.Called {
		status, a, err := g.do(ctx, http.MethodGet, "", nil, "charges", key)
		if err != nil {
			return Payment{}, err
		}
		switch {
		case status == http.StatusNotFound: // it did not come through
		case status != http.StatusOK:
			return Payment{}, unexpected("ask for charge "+key, status, a)
		case a.Status == gatewayCharged:
			return paid(a, o)
		default:
			return Payment{}, saga.Fail("payment declined: it is %s", a.Status)
		}
	}
	status, a, err := g.do(ctx, http.MethodPost, key, gatewayRequest{Order: o.ID, AmountCents: o.TotalCents, Token: o.PaymentToken}, "charges")
	switch {
	case err != nil:
		return Payment{}, err
	case status/100 == 2:
		return paid(a, o)
	case status == http.StatusPaymentRequired, status == http.StatusUnprocessableEntity:
		return Payment{}, saga.Fail("payment declined")
	}
	return Payment{}, unexpected("charge "+key, status, a)
}

// maxPaymentID is how long a payment's id may be.
const maxPaymentID = 36

func paid(a gatewayAnswer, o Order) (Payment, error) {
	if a.ID == "" || len(a.ID) > maxPaymentID {
		return Payment{}, fmt.Errorf("the payment gateway charged order %s under an id of %d bytes; 1 to %d are possible", o.ID, len(a.ID), maxPaymentID)
	}
	return Payment{ID: a.ID, AmountCents: o.TotalCents, Gateway: true}, nil
}

// Refund is what a refund came to.
type Refund struct {
	PaymentID string `json:"payment_id,omitempty"` // that was refunded; "": there was none, and there will be none
}

// refund has a charge refunded, or kept from happening if the gateway has not heard of it: it may
// be on its way.
func (g *Gateway) refund(ctx context.Context, info saga.Info, o Order, done Payment) (Refund, error) {
	if !info.Unknown && !done.Gateway {
		return Refund{}, nil // charged by a worker without a gateway
	}
	charge := info.ActionKey()
	status, a, err := g.do(ctx, http.MethodPost, info.IdempotencyKey(),
		gatewayRequest{Order: o.ID, AmountCents: o.TotalCents, ChargeKey: charge}, "refunds")
	switch {
	case err != nil:
		return Refund{}, err
	case status/100 == 2 && a.Status == gatewayVoided && !info.Unknown:
		return Refund{}, saga.Fail("payment %s of order %s was charged, but the payment gateway at %s says that it has no charge with the key %s (voided): "+
			"nothing was refunded; find out there where the money is", done.ID, o.ID, g.root.Host, charge)
	case status/100 == 2 && a.Status == gatewayVoided:
		return Refund{}, nil
	case status/100 == 2 && a.Status == gatewayRefunded && a.ChargeID != "" && len(a.ChargeID) <= maxPaymentID:
		return Refund{PaymentID: a.ChargeID}, nil
	case status == http.StatusPaymentRequired, status == http.StatusUnprocessableEntity:
		return Refund{}, saga.Fail("the payment gateway refuses to refund %s: %s", charge, cmp.Or(a.Error, "it does not say why"))
	}
	return Refund{}, unexpected("refund "+charge, status, a)
}

// unexpected is the error of an answer that leaves open what happened.
func unexpected(verb string, status int, a gatewayAnswer) error {
	return fmt.Errorf("payment gateway: HTTP %d, status %q, error %q, to %s", status, a.Status, a.Error, verb) // a list shows the start
}

// do makes a request. After an error nobody knows whether it was carried out.
func (g *Gateway) do(ctx context.Context, method, key string, body any, path ...string) (status int, a gatewayAnswer, err error) {
	for i := range path {
		path[i] = url.PathEscape(path[i])
	}
	var content io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, a, fmt.Errorf("%s %s: %w", method, path[0], err)
		}
		content = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, g.root.JoinPath(path...).String(), content)
	if err != nil {
		return 0, a, fmt.Errorf("%s %s: %w", method, path[0], err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		// Without GetBody, net/http does not by itself repeat a request with a key on a connection
		// that was closed meanwhile. When it is repeated the engine knows of it.
		req.Header.Set("Idempotency-Key", key)
		req.GetBody = nil
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return 0, a, fmt.Errorf("payment gateway: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read, or is of no use
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return 0, a, fmt.Errorf("payment gateway: read the answer to %s %s: %w", method, path[0], err)
	}
	if err := json.Unmarshal(b, &a); err != nil && resp.StatusCode/100 == 2 {
		return 0, a, fmt.Errorf("payment gateway: the answer to %s %s is no JSON: %w", method, path[0], err)
	}
	return resp.StatusCode, a, nil
}
