-- The outbox, who publishes it, and what is to be published later.
--
-- Ids, keys and names from outside are VARBINARY: a text collation pads spaces and refuses
-- invalid UTF-8, so two ids would collide, and poison could not be parked.

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS outbox_events (
    id              BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT,
    message_id      VARBINARY(255)    NOT NULL,
    ordering_key    VARBINARY(255)    NOT NULL,
    -- Computed here so that no writer, in any language, can get it wrong.
    shard           TINYINT UNSIGNED  AS (CRC32(ordering_key) MOD 16) STORED,
    aggregate_type  VARBINARY(255)    NOT NULL DEFAULT '',
    aggregate_id    VARBINARY(255)    NOT NULL DEFAULT '',
    event_type      VARBINARY(255)    NOT NULL DEFAULT '',
    exchange        VARBINARY(255)    NOT NULL,
    routing_key     VARBINARY(255)    NOT NULL,
    mandatory       BOOLEAN           NOT NULL DEFAULT TRUE,
    properties      MEDIUMBLOB        NOT NULL,
    headers         MEDIUMBLOB        NOT NULL,
    payload         LONGBLOB          NOT NULL,
    idempotency_key VARBINARY(255)    NULL,
    -- Bumped by requeue and republish, so that a late mark of an earlier copy does not count.
    generation      INT UNSIGNED      NOT NULL DEFAULT 0,
    status          VARCHAR(9)        CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'PENDING',
    attempts        INT UNSIGNED      NOT NULL DEFAULT 0, -- refusals by the broker only
    next_attempt_at DATETIME(6)       NULL,
    last_error      TEXT              NULL,
    created_at      DATETIME(6)       NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    published_at    DATETIME(6)       NULL,
    PRIMARY KEY (id),
    UNIQUE KEY uq_outbox_idempotency (idempotency_key),
    -- Serves the relay's read exactly: WHERE shard = ? AND status = 'PENDING' AND id > ? ORDER BY id.
    KEY ix_outbox_relay (shard, status, id),
    KEY ix_outbox_message (message_id),
    KEY ix_outbox_retention (status, published_at),
    CONSTRAINT ck_outbox_message_id CHECK (LENGTH(message_id) > 0), -- the inbox knows messages by it
    CONSTRAINT ck_outbox_status CHECK (status IN ('PENDING', 'PUBLISHED', 'PARKED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS outbox_shards (
    shard        TINYINT UNSIGNED NOT NULL,
    owner        VARBINARY(128)   NULL,
    epoch        BIGINT UNSIGNED  NOT NULL DEFAULT 0, -- bumped by every take-over
    renewals     BIGINT UNSIGNED  NOT NULL DEFAULT 0, -- bumped by every renewal: a sign of life that needs no clock
    leased_until DATETIME(6)      NULL,               -- for operators; nobody decides by it
    PRIMARY KEY (shard)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

INSERT IGNORE INTO outbox_shards (shard)
VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), (12), (13), (14), (15);

CREATE TABLE IF NOT EXISTS relay_members (
    relay_id     VARBINARY(128)  NOT NULL,
    host         VARBINARY(255)  NOT NULL,
    heartbeats   BIGINT UNSIGNED NOT NULL DEFAULT 0,
    started_at   DATETIME(6)     NOT NULL,
    heartbeat_at DATETIME(6)     NOT NULL,
    PRIMARY KEY (relay_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS scheduled_messages (
    id              BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    due_at          DATETIME(6)     NOT NULL,
    message_id      VARBINARY(255)  NOT NULL,
    ordering_key    VARBINARY(255)  NOT NULL,
    aggregate_type  VARBINARY(255)  NOT NULL DEFAULT '',
    aggregate_id    VARBINARY(255)  NOT NULL DEFAULT '',
    event_type      VARBINARY(255)  NOT NULL DEFAULT '',
    exchange        VARBINARY(255)  NOT NULL,
    routing_key     VARBINARY(255)  NOT NULL,
    mandatory       BOOLEAN         NOT NULL DEFAULT TRUE,
    properties      MEDIUMBLOB      NOT NULL,
    headers         MEDIUMBLOB      NOT NULL,
    payload         LONGBLOB        NOT NULL,
    idempotency_key VARBINARY(255)  NULL,
    last_error      TEXT            NULL,
    created_at      DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (id),
    KEY ix_scheduled_due (due_at, id),
    KEY ix_scheduled_message (message_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS scheduled_messages;
DROP TABLE IF EXISTS relay_members;
DROP TABLE IF EXISTS outbox_shards;
DROP TABLE IF EXISTS outbox_events;
