package travel

import (
	"context"
	"errors"
	"time"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Insurer is another company's service. All calls with one key are one to it.
type Insurer interface {
	Insure(ctx context.Context, key string, t Trip) (policy string, err error)
	// Void also has no effect left of what comes only later.
	Void(ctx context.Context, key string) error
}

// ErrRefused is an Insurer's last word; after any other error nobody knows what it has done.
var ErrRefused = errors.New("refused")

type Policy struct{ Number string }

// BookInsuredTrip is the second version of BookTrip. It has a point of no return.
func BookInsuredTrip(with Insurer) *saga.Definition {
	insure := func(ctx context.Context, info saga.Info, t Trip) (Policy, error) {
		number, err := with.Insure(ctx, info.IdempotencyKey(), t)
		if errors.Is(err, ErrRefused) {
			return Policy{}, saga.Fail("the trip is not insured: %v", err)
		}
		return Policy{number}, err
	}
	void := func(ctx context.Context, info saga.Info, _ Trip, _ Policy) (struct{}, error) {
		return struct{}{}, with.Void(ctx, info.ActionKey()) // whether it came to a policy or nobody knows
	}
	return saga.Define("book-trip", 2,
		saga.Step("book-flight", "travel", fly, cancel),
		saga.RemoteStep[Trip, Booking]("book-hotel", "hotel", saga.Deadline(10*time.Minute), saga.Retry(3, time.Second)),
		saga.Step("insure", "travel", insured, uninsured, saga.Prepare(insure), saga.PrepareCompensation(void)),
		saga.Step("book-car", "travel", drive, cancel, saga.Pivot()),
	)
}

// insured writes what there is to write here, in the transaction that goes on with the saga.
func insured(ctx context.Context, _ *sqltx.Tx, _ Trip) (Policy, error) {
	return saga.Prepared[Policy](ctx)
}

func uninsured(context.Context, *sqltx.Tx, Trip, Policy) error { return nil }
