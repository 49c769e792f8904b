package participant

import (
	"context"
	"database/sql"
	"fmt"
)

// Schema makes the table that Handle needs in the service's database. A row of a saga that has
// ended may be deleted once no copy of its commands can come any more, parked ones included: after
// 60 days with Backstep's defaults.
const Schema = `
CREATE TABLE IF NOT EXISTS backstep_barriers (
    saga_id    VARBINARY(255) NOT NULL,
    step       VARBINARY(255) NOT NULL,
    state      VARCHAR(11)    CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    command_id VARBINARY(255) NOT NULL, -- of the command that made it so
    result     LONGBLOB       NULL,     -- of the action, JSON
    reason     TEXT           NULL,     -- of a refusal
    updated_at DATETIME(6)    NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),
    PRIMARY KEY (saga_id, step),
    KEY barriers_updated (updated_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin`

// The states of a step. A row is stateNew only until its transaction ends.
const (
	stateNew         = "NEW"
	stateCompleted   = "COMPLETED"
	stateRefused     = "REFUSED"
	stateCompensated = "COMPENSATED"
)

// Whoever comes first makes the row; action and compensation at the same time wait here for each
// other. An update that changes nothing, because INSERT IGNORE would hide other errors and take a
// weaker lock of a row that is there, which two could hold and neither make stronger.
const lockBarrierSQL = `
INSERT INTO backstep_barriers (saga_id, step, state, command_id)
VALUES (?, ?, 'NEW', ?)
    ON DUPLICATE KEY UPDATE saga_id = saga_id`

// Served by the primary key. A locking read, because the service's isolation level may be one at
// which others see what was there when the transaction began.
const selectBarrierSQL = `
SELECT state, command_id, result, reason
  FROM backstep_barriers
 WHERE saga_id = ?
   AND step = ?
   FOR UPDATE`

const updateBarrierSQL = `
UPDATE backstep_barriers
   SET state = ?, command_id = ?, result = COALESCE(?, result), reason = ?
 WHERE saga_id = ?
   AND step = ?`

// barrier is the row of a step of a saga.
type barrier struct {
	state     string
	commandID string
	result    []byte
	reason    string
}

// lockBarrier returns the row, locked until the transaction ends. It is made if there is none.
func lockBarrier(ctx context.Context, tx *sql.Tx, p *parsed) (b barrier, err error) {
	if _, err := tx.ExecContext(ctx, lockBarrierSQL, []byte(p.SagaID), []byte(p.Step), []byte(p.MessageID)); err != nil {
		return b, fmt.Errorf("lock its row in backstep_barriers: %w", err)
	}
	var commandID []byte
	var reason sql.NullString
	err = tx.QueryRowContext(ctx, selectBarrierSQL, []byte(p.SagaID), []byte(p.Step)).Scan(&b.state, &commandID, &b.result, &reason)
	if err != nil {
		return b, fmt.Errorf("read its row in backstep_barriers: %w", err)
	}
	b.commandID, b.reason = string(commandID), reason.String
	return b, nil
}

// writeBarrier says what has become of the step.
func writeBarrier(ctx context.Context, tx *sql.Tx, p *parsed, b barrier) error {
	_, err := tx.ExecContext(ctx, updateBarrierSQL, b.state, []byte(p.MessageID), b.result, sql.NullString{String: b.reason, Valid: b.reason != ""},
		[]byte(p.SagaID), []byte(p.Step))
	if err != nil {
		return fmt.Errorf("write its row in backstep_barriers: %w", err)
	}
	return nil
}
