-- What operators did to messages in <queue>.parked. One that was removed there and not sent again
-- is nowhere else, so all of it is here, in parts: a large statement would look like a lost
-- connection, or be refused (max_allowed_packet).

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS parked_actions (
    id           BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    queue        VARBINARY(255)  NOT NULL, -- it was parked from
    message_id   VARBINARY(255)  NOT NULL, -- by which it was named
    action       VARBINARY(32)   NOT NULL, -- replay, done, drop
    actor        VARCHAR(255)    NOT NULL,
    reason       TEXT            NOT NULL,
    message_json LONGBLOB        NOT NULL, -- when and why it was parked; its properties and headers
    created_at   DATETIME(6)     NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (id),
    KEY ix_parked_actions_message (message_id, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS parked_bodies (
    action_id BIGINT UNSIGNED NOT NULL, -- of parked_actions
    part      INT UNSIGNED    NOT NULL,
    bytes     MEDIUMBLOB      NOT NULL,
    PRIMARY KEY (action_id, part)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS parked_bodies;
DROP TABLE IF EXISTS parked_actions;
