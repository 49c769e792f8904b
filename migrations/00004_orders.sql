-- The order domain: orders, stock, payments, shipments. Money is in cents.

-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS orders (
    id            VARBINARY(36)  NOT NULL,
    -- The first message id of the request: a replay a year later still creates nothing.
    request_id    VARBINARY(255) NOT NULL,
    customer      VARCHAR(255)   NOT NULL,
    status        VARCHAR(16)    CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'PENDING',
    total_cents   BIGINT         NOT NULL,
    payment_token VARCHAR(255)   NOT NULL,
    ship_to       LONGBLOB       NOT NULL, -- JSON, as received
    reason        TEXT           NULL,     -- why it was cancelled or needs attention
    created_at    DATETIME(6)    NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    updated_at    DATETIME(6)    NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (id),
    UNIQUE KEY uq_orders_request (request_id),
    KEY ix_orders_status (status, created_at),
    CONSTRAINT ck_orders_status CHECK (status IN ('PENDING', 'CONFIRMED', 'CANCELLED', 'NEEDS_ATTENTION')),
    CONSTRAINT ck_orders_total CHECK (total_cents >= 0)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS order_items (
    order_id    VARBINARY(36)     NOT NULL,
    line        SMALLINT UNSIGNED NOT NULL,
    sku         VARBINARY(64)     NOT NULL,
    quantity    BIGINT            NOT NULL,
    price_cents BIGINT            NOT NULL,
    PRIMARY KEY (order_id, line),
    CONSTRAINT ck_items CHECK (quantity > 0 AND price_cents > 0)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS inventory (
    sku       VARBINARY(64) NOT NULL,
    initial   BIGINT        NOT NULL,
    available BIGINT        NOT NULL,
    reserved  BIGINT        NOT NULL DEFAULT 0,
    shipped   BIGINT        NOT NULL DEFAULT 0,
    PRIMARY KEY (sku),
    CONSTRAINT ck_inventory CHECK (available >= 0 AND reserved >= 0 AND shipped >= 0)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS payments (
    id           VARBINARY(36) NOT NULL,
    order_id     VARBINARY(36) NOT NULL,
    amount_cents BIGINT        NOT NULL,
    status       VARCHAR(8)    CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    charged_at   DATETIME(6)   NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    refunded_at  DATETIME(6)   NULL,
    PRIMARY KEY (id),
    UNIQUE KEY uq_payments_order (order_id),
    CONSTRAINT ck_payments CHECK (status IN ('CHARGED', 'REFUNDED') AND amount_cents >= 0)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS payment_idempotency (
    idempotency_key VARBINARY(255) NOT NULL, -- <saga id>:<step>:<direction>
    payment_id      VARBINARY(36)  NOT NULL,
    created_at      DATETIME(6)    NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    PRIMARY KEY (idempotency_key)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE IF NOT EXISTS shipments (
    id           VARBINARY(36) NOT NULL,
    order_id     VARBINARY(36) NOT NULL,
    status       VARCHAR(9)    CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    created_at   DATETIME(6)   NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    cancelled_at DATETIME(6)   NULL,
    PRIMARY KEY (id),
    UNIQUE KEY uq_shipments_order (order_id),
    CONSTRAINT ck_shipments CHECK (status IN ('CREATED', 'CANCELLED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE IF EXISTS shipments;
DROP TABLE IF EXISTS payment_idempotency;
DROP TABLE IF EXISTS payments;
DROP TABLE IF EXISTS inventory;
DROP TABLE IF EXISTS order_items;
DROP TABLE IF EXISTS orders;
