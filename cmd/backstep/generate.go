package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"

	"backstep/internal/handlers"
)

// kind is what is to become of a generated order.
type kind string

// The kinds. The words in want.reason are those of the steps that refuse.
const (
	kindFine    kind = "fine"
	kindNoStock kind = "no-stock" // asks for more than any stock
	kindDecline kind = "decline"  // its payment is declined
	kindRefuse  kind = "refuse"   // no carrier takes it
)

// mix says how many orders there are, and how many of them are of which kind. The rest is fine.
type mix struct{ count, noStock, decline, refuse int }

func (m mix) validate() error {
	switch {
	case m.count < 0 || m.noStock < 0 || m.decline < 0 || m.refuse < 0:
		return usagef("a number of orders must not be negative")
	case m.noStock+m.decline+m.refuse > m.count:
		return usagef("--no-stock, --decline and --refuse add up to %d, more than --count %d",
			m.noStock+m.decline+m.refuse, m.count)
	}
	return nil
}

// moreThanAnyStock is more than anybody stocks, and times any price still a small number.
const moreThanAnyStock = 1_000_000_000_000

// people and places: names in several scripts, to see that they come through.
var (
	people = []string{"Ada Lovelace", "山田 太郎", "Zoë Müller", "Олена Коваль", "José Núñez", "सुनीता शर्मा", "Kim 😀 Larsen", "نور الدين"}
	places = []handlers.ShipTo{
		{Street: "12 St James's Square", City: "London", Country: "GB"},
		{Street: "丸の内 1-9-1", City: "東京", Country: "JP"},
		{Street: "Königsallee 2", City: "Düsseldorf", Country: "DE"},
		{Street: "вул. Хрещатик 22", City: "Київ", Country: "UA"},
		{Street: "Calle de Alcalá 1", City: "Madrid", Country: "ES"},
	}
)

// generate makes orders over the first skus seeded SKUs, the kinds mixed. The same arguments
// give the same orders.
func generate(m mix, seed uint64, skus int) []order {
	r := rand.New(rand.NewPCG(seed, seed))
	kinds := make([]kind, 0, m.count)
	for _, k := range []struct {
		kind kind
		n    int
	}{{kindNoStock, m.noStock}, {kindDecline, m.decline}, {kindRefuse, m.refuse}} {
		for range k.n {
			kinds = append(kinds, k.kind)
		}
	}
	for len(kinds) < m.count {
		kinds = append(kinds, kindFine)
	}
	r.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	orders := make([]order, m.count)
	for i, k := range kinds {
		orders[i] = order{Line: i + 1, Kind: k, body: body(r, k, i+1, skus)}
	}
	return orders
}

func body(r *rand.Rand, k kind, n, skus int) []byte {
	o := handlers.CreateOrder{
		Customer:     people[r.IntN(len(people))],
		PaymentToken: fmt.Sprintf("tok-%06d", n),
		ShipTo:       places[r.IntN(len(places))],
	}
	o.ShipTo.Name = o.Customer
	lines := 1 + r.IntN(min(3, skus))
	for _, sku := range r.Perm(skus)[:lines] {
		o.Items = append(o.Items, handlers.Item{
			SKU: handlers.SKU(sku), Quantity: int64(1 + r.IntN(5)), PriceCents: int64(199 + 50*(sku%40)),
		})
	}
	switch k {
	case kindNoStock:
		o.Items[r.IntN(lines)].Quantity = moreThanAnyStock
	case kindDecline:
		o.PaymentToken = fmt.Sprintf("decline-%06d", n)
	case kindRefuse:
		o.ShipTo.Country = "ZZ"
	}
	for _, it := range o.Items {
		o.TotalCents += it.Quantity * it.PriceCents
	}
	b, err := json.Marshal(o)
	if err != nil {
		panic(err) // plain values always marshal
	}
	return b
}
