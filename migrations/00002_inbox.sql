-- One row per message a consumer has processed; it commits together with the consequence.

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS inbox_messages (
    consumer     VARBINARY(255) NOT NULL, -- the queue
    message_id   VARBINARY(255) NOT NULL,
    processed_at DATETIME(6)    NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (consumer, message_id),
    KEY ix_inbox_retention (processed_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS inbox_messages;
