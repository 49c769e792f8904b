package inbox

import "sync/atomic"

// Stats counts what lanes did since the process started.
type Stats struct {
	Batches, Done, Duplicates, Stale, Parked, Deferred, Retried, Calls, Conflicts atomic.Int64
}

// Snapshot is Stats at one moment.
type Snapshot struct {
	Batches    int64 `json:"batches"`
	Done       int64 `json:"done"`
	Duplicates int64 `json:"duplicates"`
	Stale      int64 `json:"stale"`
	Parked     int64 `json:"parked"`
	Deferred   int64 `json:"deferred"`
	Retried    int64 `json:"retried"`
	Calls      int64 `json:"calls"` // to systems that are not ours
	Conflicts  int64 `json:"conflicts"`
}

// Snapshot reads the counters.
func (s *Stats) Snapshot() Snapshot {
	return Snapshot{
		Batches: s.Batches.Load(), Done: s.Done.Load(), Duplicates: s.Duplicates.Load(), Stale: s.Stale.Load(),
		Parked: s.Parked.Load(), Deferred: s.Deferred.Load(), Retried: s.Retried.Load(),
		Calls: s.Calls.Load(), Conflicts: s.Conflicts.Load(),
	}
}
