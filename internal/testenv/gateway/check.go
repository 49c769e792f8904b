package gateway

import "fmt"

// Check returns what is wrong with the ledger, given the status of every order: two charges or two
// refunds of one, a confirmed one that is not charged, or one that has ended otherwise and is charged
// and not refunded.
func (l Ledger) Check(orders map[string]string) (faults []string) {
	charged, refunded, ids := map[string]int{}, map[string]int{}, map[string]int{}
	for _, c := range l.Charges {
		if c.Status == Charged {
			charged[c.Order]++
		}
		if ids[c.Key]++; ids[c.Key] > 1 {
			faults = append(faults, fmt.Sprintf("key %s is in the ledger %d times", c.Key, ids[c.Key]))
		}
	}
	for _, r := range l.Refunds {
		if r.Status == Refunded {
			refunded[r.Order]++
		}
	}
	for order, status := range orders {
		c, r := charged[order], refunded[order]
		switch {
		case c > 1 || r > 1 || r > c:
			faults = append(faults, fmt.Sprintf("order %s is %s, with %d charges and %d refunds", order, status, c, r))
		case status == "CONFIRMED" && c-r != 1, status != "CONFIRMED" && c != r:
			faults = append(faults, fmt.Sprintf("order %s is %s, with %d charges and %d refunds", order, status, c, r))
		}
		delete(charged, order)
	}
	for order, n := range charged {
		faults = append(faults, fmt.Sprintf("%d charges of order %q, which there is not", n, order))
	}
	return faults
}
