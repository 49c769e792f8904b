package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// errDuplicate means at least one message of the batch has been processed before.
var errDuplicate = errors.New("inbox: duplicate in batch")

// Plain INSERT on purpose: IGNORE hides other errors, and an upsert that changes nothing
// reports one row like a fresh insert when clientFoundRows is on.
const recordSQL = `INSERT INTO inbox_messages (consumer, message_id) VALUES `

const selectRecordedSQL = `
SELECT message_id
  FROM inbox_messages
 WHERE consumer = ?
   AND message_id IN (`

const unrecordSQL = `
DELETE FROM inbox_messages
 WHERE consumer = ?
   AND message_id IN (`

// record writes one row for each id, sorted, so that two batches with common ids wait for
// each other instead of deadlocking. errDuplicate if any of them is there already.
func record(ctx context.Context, tx *sqltx.Tx, consumer string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	ids = slices.Sorted(slices.Values(ids))
	args := make([]any, 0, 2*len(ids))
	for _, id := range ids {
		args = append(args, []byte(consumer), []byte(id))
	}
	_, err := tx.Exec(ctx, recordSQL+sqltx.Tuples(len(ids), 2), args...)
	switch sqltx.Classify(err) {
	case sqltx.None:
		return nil
	case sqltx.Duplicate:
		return errDuplicate
	}
	return fmt.Errorf("record %d messages: %w", len(ids), err)
}

// unrecord takes back the rows of messages that are parked, deferred or outside: they keep their
// id, and when they come back they are not duplicates.
func unrecord(ctx context.Context, tx *sqltx.Tx, consumer string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, unrecordSQL+sqltx.Placeholders(len(ids))+")", idArgs(consumer, ids)...); err != nil {
		return fmt.Errorf("take back %d inbox records: %w", len(ids), err)
	}
	return nil
}

func idArgs(consumer string, ids []string) []any {
	args := make([]any, 0, 1+len(ids))
	args = append(args, []byte(consumer))
	for _, id := range ids {
		args = append(args, []byte(id))
	}
	return args
}

// Recorded returns which of ids consumer has processed.
func Recorded(ctx context.Context, q sqltx.Querier, consumer string, ids []string) (map[string]bool, error) {
	return among(ctx, q, "inbox", selectRecordedSQL, consumer, ids)
}

// among returns which of ids a query finds with an owner.
func among(ctx context.Context, q sqltx.Querier, what, query, owner string, ids []string) (map[string]bool, error) {
	seen := make(map[string]bool, len(ids))
	if len(ids) == 0 {
		return seen, nil
	}
	rows, err := q.QueryContext(ctx, query+sqltx.Placeholders(len(ids))+")", idArgs(owner, ids)...)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			return nil, fmt.Errorf("read %s: %w", what, err)
		}
		seen[string(id)] = true
	}
	return seen, rows.Err()
}

// sweepMargin keeps records longer than the age at which messages are refused, so that
// clocks that differ, and a copy being processed right now, cannot fall between the two.
const sweepMargin = 24 * time.Hour

const (
	// Served by ix_inbox_retention (processed_at), which is forced: a server scans a table that is
	// small. It locks nothing: it would wait for the record that comes next, if the transaction
	// that wrote it is open.
	selectOldSQL = `
SELECT consumer, message_id
  FROM inbox_messages FORCE INDEX (ix_inbox_retention)
 WHERE processed_at < NOW(6) - INTERVAL ? SECOND
 ORDER BY processed_at
 LIMIT ?`

	// Each finds its record by the primary key.
	deleteOldSQL = `
DELETE m
  FROM (%s) AS old
       STRAIGHT_JOIN inbox_messages AS m FORCE INDEX (PRIMARY)
               ON m.consumer = old.consumer AND m.message_id = old.message_id`
)

// Sweep deletes at most limit records older than the retention and a day's margin, and
// returns how many it deleted. Lanes park messages older than the retention, so a record is
// never missed.
func Sweep(ctx context.Context, db *sql.DB, retention time.Duration, limit int) (int64, error) {
	var n int64
	err := sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		n, err = sweep(ctx, tx, retention, limit)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("sweep inbox: %w", err)
	}
	return n, nil
}

func sweep(ctx context.Context, tx *sqltx.Tx, retention time.Duration, limit int) (int64, error) {
	rows, err := tx.Query(ctx, selectOldSQL, int64((retention + sweepMargin).Seconds()), limit)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	var keys []any
	for rows.Next() {
		var consumer, id []byte
		if err := rows.Scan(&consumer, &id); err != nil {
			return 0, err
		}
		keys = append(keys, consumer, id)
	}
	if err := rows.Err(); err != nil || len(keys) == 0 {
		return 0, err
	}
	list := "SELECT ? AS consumer, ? AS message_id" + strings.Repeat(" UNION ALL SELECT ?, ?", len(keys)/2-1)
	res, err := tx.Exec(ctx, fmt.Sprintf(deleteOldSQL, list), keys...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}
