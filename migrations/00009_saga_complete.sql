-- What the complete saga engine needs: deadlines, cancelling, skipped steps, calls to systems that
-- are not ours, and what workers know about their queues.

-- +goose NO TRANSACTION
-- +goose Up
-- MySQL has no ADD COLUMN IF NOT EXISTS, and every statement must be able to run twice.
-- Deadlines are by a clock that stands still during outages: NOW(6) less saga_pulse.downtime_us.
-- deadline_at is the earlier one of the step's and the saga's.
SET @add_saga = IF(EXISTS(SELECT 1 FROM information_schema.columns
                           WHERE table_schema = DATABASE() AND table_name = 'saga_instances' AND column_name = 'skipped'),
    'DO 0',
    'ALTER TABLE saga_instances
         ADD COLUMN skipped BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT ''steps an operator skipped: bit i is step i'',
         ADD COLUMN cancel_reason TEXT NULL COMMENT ''somebody wants it undone; done when its open call is resolved'',
         ADD COLUMN call_open BOOLEAN NOT NULL DEFAULT FALSE COMMENT ''its step made a call whose outcome is not known'',
         ADD COLUMN saga_deadline_at DATETIME(6) NULL');
PREPARE add_saga FROM @add_saga;
EXECUTE add_saga;
DEALLOCATE PREPARE add_saga;

-- The journal of calls to systems that are not ours: the intent is here before the call, and its
-- outcome, once known, for ever. A call without an outcome may have happened.
CREATE TABLE IF NOT EXISTS saga_calls (
    saga_id    VARBINARY(36)     NOT NULL,
    step_order SMALLINT UNSIGNED NOT NULL, -- index into the definition's steps
    direction  VARCHAR(10)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    status     VARCHAR(8)        CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'OPEN',
    calls      INT UNSIGNED      NOT NULL DEFAULT 0, -- how often it was called
    outcome    LONGBLOB          NULL,               -- what it answered, JSON
    error      TEXT              NULL,               -- the last one
    opened_at  DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (saga_id, step_order, direction),
    CONSTRAINT ck_calls_status CHECK (status IN ('OPEN', 'DONE', 'REFUSED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- One row. Somebody's pulse is here while database, broker and a worker are all up; a gap in it is
-- an outage, and its length is added to downtime_us.
CREATE TABLE IF NOT EXISTS saga_pulse (
    id          TINYINT UNSIGNED NOT NULL,
    beat_at     DATETIME(6)      NOT NULL,
    up_since    DATETIME(6)      NOT NULL,
    downtime_us BIGINT           NOT NULL DEFAULT 0,
    PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- How far each consumer of a queue has come: nothing that was published before latest_at waits for
-- it any more.
CREATE TABLE IF NOT EXISTS saga_consumers (
    queue      VARBINARY(255) NOT NULL,
    consumer   VARBINARY(64)  NOT NULL, -- one process
    latest_at  DATETIME(6)    NULL,     -- when the newest first delivery that it has settled was published
    idle_since DATETIME(6)    NULL,     -- NULL: it has deliveries in hand
    beat_at    DATETIME(6)    NOT NULL,
    PRIMARY KEY (queue, consumer)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS saga_consumers;
DROP TABLE IF EXISTS saga_pulse;
DROP TABLE IF EXISTS saga_calls;
ALTER TABLE saga_instances DROP COLUMN skipped, DROP COLUMN cancel_reason, DROP COLUMN call_open, DROP COLUMN saga_deadline_at;
