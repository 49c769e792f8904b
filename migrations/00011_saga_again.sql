-- When the command of another service's step is emitted once more, if no reply has come by then. A
-- column of its own with an index: the keeper reads what is due and no saga that merely waits.

-- +goose NO TRANSACTION
-- +goose Up
-- MySQL has no ADD COLUMN IF NOT EXISTS, and every statement must be able to run twice.
SET @add_again = IF(EXISTS(SELECT 1 FROM information_schema.columns
                            WHERE table_schema = DATABASE() AND table_name = 'saga_instances' AND column_name = 'again_at'),
    'DO 0',
    'ALTER TABLE saga_instances
         ADD COLUMN again_at DATETIME(6) NULL COMMENT ''by the clock of deadlines; NULL: never, or done'',
         ADD KEY ix_saga_again (again_at)');
PREPARE add_again FROM @add_again;
EXECUTE add_again;
DEALLOCATE PREPARE add_again;

-- +goose Down
ALTER TABLE saga_instances DROP KEY ix_saga_again, DROP COLUMN again_at;
