package bench

import (
	"math"
	"slices"
	"time"
)

// Quantile returns the smallest of the durations that a share q of them, 0 < q ≤ 1, does not
// exceed (the nearest rank), and 0 if there are none. The slice stays as it is.
func Quantile(durations []time.Duration, q float64) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(durations))
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}
