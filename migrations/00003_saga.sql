-- Saga instances, what their steps did, and what operators did to them.

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS saga_instances (
    id             VARBINARY(36)     NOT NULL,
    type           VARBINARY(128)    NOT NULL,
    version        INT UNSIGNED      NOT NULL,
    correlation_id VARBINARY(255)    NOT NULL,
    status         VARCHAR(16)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    direction      VARCHAR(10)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'execute',
    current_step   SMALLINT UNSIGNED NOT NULL DEFAULT 0, -- index into the definition's steps
    attempt        INT UNSIGNED      NOT NULL DEFAULT 1, -- of the command that is awaited
    command_id     VARBINARY(255)    NULL,               -- the one message this saga waits for
    awaited_since  DATETIME(6)       NULL,
    rescues        INT UNSIGNED      NOT NULL DEFAULT 0,
    payload        LONGBLOB          NOT NULL,           -- the saga's input, JSON
    deadline_at    DATETIME(6)       NULL,
    last_error     TEXT              NULL,
    trace_id       VARBINARY(32)     NOT NULL DEFAULT '',
    created_at     DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at     DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    finished_at    DATETIME(6)       NULL,
    PRIMARY KEY (id),
    UNIQUE KEY uq_saga_correlation (type, correlation_id),
    KEY ix_saga_status (status, updated_at),
    KEY ix_saga_deadline (deadline_at),
    CONSTRAINT ck_saga_status CHECK (status IN
        ('RUNNING', 'COMPLETED', 'COMPENSATING', 'COMPENSATED', 'MANUAL_ACTION')),
    CONSTRAINT ck_saga_direction CHECK (direction IN ('execute', 'compensate'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS saga_steps (
    saga_id     VARBINARY(36)     NOT NULL,
    step_order  SMALLINT UNSIGNED NOT NULL, -- index into the definition's steps
    name        VARBINARY(128)    NOT NULL,
    status      VARCHAR(12)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    attempts    INT UNSIGNED      NOT NULL DEFAULT 0, -- in the direction its status tells
    result      LONGBLOB          NULL,               -- what the action returned, JSON
    error       TEXT              NULL,
    started_at  DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at  DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (saga_id, step_order),
    CONSTRAINT ck_step_status CHECK (status IN
        ('PENDING', 'RUNNING', 'WAITING', 'COMPLETED', 'FAILED', 'COMPENSATING', 'COMPENSATED', 'SKIPPED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS saga_actions (
    id          BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    saga_id     VARBINARY(36)   NOT NULL,
    action      VARBINARY(32)   NOT NULL,
    actor       VARCHAR(255)    NOT NULL,
    reason      TEXT            NOT NULL,
    before_json LONGBLOB        NULL,
    after_json  LONGBLOB        NULL,
    created_at  DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (id),
    KEY ix_actions_saga (saga_id, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS saga_actions;
DROP TABLE IF EXISTS saga_steps;
DROP TABLE IF EXISTS saga_instances;
