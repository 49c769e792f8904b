package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"backstep/internal/handlers"
)

func TestGenerate(t *testing.T) {
	const skus = 20
	m := mix{count: 200, noStock: 13, decline: 13, refuse: 14}
	got := map[kind]int{}
	used := map[string]bool{}
	var kinds []kind
	for i, o := range generate(m, 7, skus) {
		var body handlers.CreateOrder
		if err := json.Unmarshal(o.body, &body); err != nil {
			t.Fatalf("order %d: %v", o.Line, err)
		}
		if o.Line != i+1 {
			t.Errorf("order %d has number %d", i+1, o.Line)
		}
		if k := kindOf(body); k != o.Kind {
			t.Errorf("order %d is said to be %s and is %s: %s", o.Line, o.Kind, k, o.body)
		}
		got[o.Kind]++
		kinds = append(kinds, o.Kind)
		var total int64
		for _, it := range body.Items {
			total += it.Quantity * it.PriceCents
			used[it.SKU] = true
			if it.PriceCents <= 0 || it.Quantity <= 0 || it.SKU < handlers.SKU(0) || it.SKU > handlers.SKU(skus-1) {
				t.Errorf("order %d has line %+v", o.Line, it)
			}
		}
		if total != body.TotalCents || total <= 0 {
			t.Errorf("order %d: total %d, lines %d", o.Line, body.TotalCents, total)
		}
	}
	if got[kindFine] != 160 || got[kindNoStock] != 13 || got[kindDecline] != 13 || got[kindRefuse] != 14 {
		t.Errorf("kinds %v", got)
	}
	if len(used) != skus {
		t.Errorf("%d SKUs are used, want all %d", len(used), skus)
	}
	if slices.Equal(kinds, slices.SortedFunc(slices.Values(kinds), func(a, b kind) int { return strings.Compare(string(a), string(b)) })) {
		t.Error("the kinds are not mixed")
	}
}

// kindOf tells from the body alone, as the workers do.
func kindOf(o handlers.CreateOrder) kind {
	for _, it := range o.Items {
		if it.Quantity >= moreThanAnyStock {
			return kindNoStock
		}
	}
	switch {
	case strings.HasPrefix(o.PaymentToken, "decline"):
		return kindDecline
	case o.ShipTo.Country == "ZZ":
		return kindRefuse
	}
	return kindFine
}

func TestGenerateIsDeterministic(t *testing.T) {
	text := func(seed uint64) string {
		var b strings.Builder
		for _, o := range generate(mix{count: 50, noStock: 5, decline: 5, refuse: 5}, seed, 10) {
			fmt.Fprintf(&b, "%s %s\n", o.Kind, o.body)
		}
		return b.String()
	}
	first, again, other := text(1), text(1), text(2)
	if first != again {
		t.Error("one seed gave different orders")
	}
	if first == other {
		t.Error("two seeds gave the same orders")
	}
}

func TestMixValidate(t *testing.T) {
	tests := []struct {
		mix mix
		ok  bool
	}{
		{mix{}, true},
		{mix{count: 3, noStock: 1, decline: 1, refuse: 1}, true},
		{mix{count: 2, noStock: 1, decline: 1, refuse: 1}, false},
		{mix{count: -1}, false},
		{mix{count: 1, refuse: -1}, false},
	}
	for _, tt := range tests {
		if err := tt.mix.validate(); (err == nil) != tt.ok {
			t.Errorf("validate(%+v) = %v", tt.mix, err)
		}
	}
}

func TestDemoMix(t *testing.T) {
	tests := []struct {
		orders int
		want   mix
	}{
		{200, mix{200, 13, 13, 14}},
		{1000, mix{1000, 65, 65, 70}},
		{40, mix{40, 3, 3, 3}},
		{1, mix{count: 1}},
	}
	for _, tt := range tests {
		if got := (demoOptions{orders: tt.orders}).mix(); got != tt.want || got.validate() != nil {
			t.Errorf("mix of %d orders = %+v, want %+v", tt.orders, got, tt.want)
		}
	}
}
