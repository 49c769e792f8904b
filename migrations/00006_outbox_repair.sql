-- What operators did to outbox rows, and how a relay is asked to hand over a shard: a row may
-- be dropped only when no relay has it in memory or in flight (docs/adr/0004).

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS outbox_actions (
    id          BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    row_id      BIGINT UNSIGNED NOT NULL, -- of outbox_events; the row may be gone
    message_id  VARBINARY(255)  NOT NULL,
    action      VARBINARY(32)   NOT NULL, -- requeue, withdraw, drop, republish
    actor       VARCHAR(255)    NOT NULL,
    reason      TEXT            NOT NULL,
    before_json LONGBLOB        NULL,     -- the row as it was; of a dropped one, all of it
    created_at  DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (id),
    KEY ix_outbox_actions_row (row_id, id),
    KEY ix_outbox_actions_message (message_id, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- MySQL has no ADD COLUMN IF NOT EXISTS, and every statement must be able to run twice.
SET @add_recalled = IF(EXISTS(SELECT 1 FROM information_schema.columns
                               WHERE table_schema = DATABASE() AND table_name = 'outbox_shards' AND column_name = 'recalled'),
    'DO 0',
    'ALTER TABLE outbox_shards ADD COLUMN recalled BOOLEAN NOT NULL DEFAULT FALSE COMMENT ''its owner is asked to hand it over''');
PREPARE add_recalled FROM @add_recalled;
EXECUTE add_recalled;
DEALLOCATE PREPARE add_recalled;

-- +goose Down
ALTER TABLE outbox_shards DROP COLUMN recalled;
DROP TABLE IF EXISTS outbox_actions;
