package handlers

import (
	"math"
	"strings"
	"testing"
)

func item(sku string, quantity, price int64) Item {
	return Item{SKU: sku, Quantity: quantity, PriceCents: price}
}

func TestValidate(t *testing.T) {
	tests := []struct {
		name  string
		items []Item
		total int64
		fault string // "": accepted
	}{
		{"one line", []Item{item("A", 2, 50)}, 100, ""},
		{"equal SKUs on several lines", []Item{item("A", 1, 50), item("A", 2, 40)}, 130, ""},
		{"any script", []Item{item("書籍-😀", 1, 1)}, 1, ""},
		{"no lines", nil, 0, "no lines"},
		{"zero quantity", []Item{item("A", 0, 50)}, 0, "quantity 0"},
		{"negative quantity", []Item{item("A", -1, 50)}, -50, "quantity -1"},
		{"zero price", []Item{item("A", 1, 0)}, 0, "price 0"},
		{"negative price", []Item{item("A", 1, -5)}, -5, "price -5"},
		{"line overflows", []Item{item("A", math.MaxInt64, 2)}, -2, "line 1 overflows"},
		{"total overflows", []Item{item("A", 1, math.MaxInt64), item("B", 1, 1)}, math.MinInt64, "total overflows at line 2"},
		{"total overflows back to the right sum", []Item{item("A", 1, math.MaxInt64), item("B", 1, math.MaxInt64), item("C", 1, 3)}, 1, "total overflows"},
		{"total does not match", []Item{item("A", 2, 50)}, 99, "add up to 100"},
		{"blank SKU", []Item{item(" \t", 1, 1)}, 1, "blank SKU"},
		{"empty SKU", []Item{item("", 1, 1)}, 1, "blank SKU"},
		{"SKU too long", []Item{item(strings.Repeat("x", 65), 1, 1)}, 1, "65 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := CreateOrder{Customer: "c", Items: tt.items, TotalCents: tt.total}
			err := o.validate()
			if tt.fault == "" && err != nil || tt.fault != "" && (err == nil || !strings.Contains(err.Error(), tt.fault)) {
				t.Errorf("validate() = %v, want %q", err, tt.fault)
			}
		})
	}
}

// B101: one error lists all faults.
func TestValidateSaysAll(t *testing.T) {
	o := CreateOrder{Customer: strings.Repeat("c", 256), Items: []Item{item(" ", 0, -1), item("A", 1, 1), item("B", -2, 0)}}
	want := "customer has more than 255 characters; line 1 has a blank SKU; line 1 has quantity 0; line 1 has price -1; " +
		"line 3 has quantity -2; line 3 has price 0"
	if err := o.validate(); err == nil || err.Error() != want {
		t.Errorf("validate() = %v, want %s", err, want)
	}
	o = CreateOrder{Items: make([]Item, 500)}
	if err := o.validate(); err == nil || !strings.HasSuffix(err.Error(), "line 4 has a blank SKU; and 1490 more") {
		t.Errorf("validate() of 500 lines with 3 faults each = %v", err)
	}
}

func TestValidateTextLimits(t *testing.T) {
	o := CreateOrder{Items: []Item{item("A", 1, 1)}, TotalCents: 1}
	o.ShipTo.Street = strings.Repeat("ß", 255)
	if err := o.validate(); err != nil {
		t.Errorf("255 characters: %v", err)
	}
	o.ShipTo.Street += "ß"
	if err := o.validate(); err == nil || !strings.Contains(err.Error(), "ship_to.street") {
		t.Errorf("256 characters: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		`{"customer":"c","items":[{"sku":"A","quantity":2,"price_cents":50}],"total_cents":100,"payment_token":"t","ship_to":{"country":"DE"}}`,
		`{}`, `null`, `[]`, `{"items":null}`, `{"items":[{"quantity":9223372036854775807,"price_cents":9223372036854775807}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		o, err := decode(body)
		if err != nil {
			return
		}
		var total int64
		for _, it := range o.Items {
			total += it.Quantity * it.PriceCents
			if it.Quantity <= 0 || it.PriceCents <= 0 || strings.TrimSpace(it.SKU) == "" {
				t.Errorf("accepted line %+v", it)
			}
		}
		if total != o.TotalCents || total <= 0 {
			t.Errorf("accepted total %d for lines of %d", o.TotalCents, total)
		}
	})
}

func TestSumBySKU(t *testing.T) {
	got := sumBySKU([]Item{item("B", 1, 1), item("A", 2, 1), item("B", 3, 1)})
	if len(got) != 2 || got[0] != (Reserved{"A", 2}) || got[1] != (Reserved{"B", 4}) {
		t.Errorf("sumBySKU = %v, want A 2, B 4, sorted", got)
	}
}
