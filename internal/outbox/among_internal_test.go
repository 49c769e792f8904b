package outbox

import (
	"fmt"
	"testing"
)

func TestAmong(t *testing.T) {
	for _, tt := range []struct {
		ids  []uint64
		want string
	}{
		{[]uint64{7}, "(id IN (?)) [7]"},
		{[]uint64{7, 8, 10}, "(id IN (?, ?, ?)) [7 8 10]"},
		{[]uint64{1, 2, 3, 4, 5, 6, 7, 8}, "(id BETWEEN ? AND ?) [1 8]"},
		{[]uint64{1, 2, 3, 4, 5, 6, 7, 9}, "(id IN (?, ?, ?, ?, ?, ?, ?, ?)) [1 2 3 4 5 6 7 9]"},
		{
			[]uint64{2, 11, 12, 13, 14, 15, 16, 17, 18, 20, 31, 32, 33, 34, 35, 36, 37, 38, 39},
			"(id BETWEEN ? AND ? OR id BETWEEN ? AND ? OR id IN (?, ?)) [11 18 31 39 2 20]",
		},
	} {
		condition, args := among(tt.ids)
		if got := fmt.Sprint(condition, " ", args); got != tt.want {
			t.Errorf("among(%v) = %s, want %s", tt.ids, got, tt.want)
		}
	}
}
