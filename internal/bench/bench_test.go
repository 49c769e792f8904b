package bench

import (
	"os"
	"testing"
	"time"
)

func TestCPUGrowsWithWork(t *testing.T) {
	before, err := CPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		after, err := CPU(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if after >= before+20*time.Millisecond {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a minute of work moved the processor time from %s to %s", before, after)
		}
	}
}

func TestBusyCPUGrowsWithWork(t *testing.T) {
	all, err := BusyCPU()
	if err != nil {
		t.Fatal(err)
	}
	mine, err := CPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		after, err := BusyCPU()
		if err != nil {
			t.Fatal(err)
		}
		if after >= all+20*time.Millisecond && after > mine {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a minute of work moved the machine's processor time from %s to %s", all, after)
		}
	}
}

func TestCPUOfNobody(t *testing.T) {
	if d, err := CPU(1 << 30); err == nil {
		t.Errorf("CPU of a process that does not exist is %s, want an error", d)
	}
}

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100-i) * time.Millisecond
	}
	for _, tt := range []struct {
		durations []time.Duration
		q         float64
		want      time.Duration
	}{
		{hundred, 0.5, 50 * time.Millisecond},
		{hundred, 0.99, 99 * time.Millisecond},
		{hundred, 1, 100 * time.Millisecond},
		{hundred, 0.001, time.Millisecond},
		{hundred[:1], 0.5, 100 * time.Millisecond},
		{nil, 0.5, 0},
	} {
		if got := Quantile(tt.durations, tt.q); got != tt.want {
			t.Errorf("Quantile(%d durations, %v) = %s, want %s", len(tt.durations), tt.q, got, tt.want)
		}
	}
}
