-- Why a saga is being undone, kept while last_error says why it has stopped: when it goes on that is its
-- reason again. It cannot be made of its steps, because they are written over while they are undone.
-- And the direction and the first id of the attempts at a step: a command that is made anew, or of a later attempt, has it as its
-- x-request-id also if the rows of the earlier ones are gone.

-- +goose NO TRANSACTION
-- +goose Up
-- MySQL has no ADD COLUMN IF NOT EXISTS, and every statement must be able to run twice.
SET @add_reason = IF(EXISTS(SELECT 1 FROM information_schema.columns
                             WHERE table_schema = DATABASE() AND table_name = 'saga_instances' AND column_name = 'undo_reason'),
    'DO 0', 'ALTER TABLE saga_instances ADD COLUMN undo_reason TEXT NULL');
PREPARE add_reason FROM @add_reason;
EXECUTE add_reason;
DEALLOCATE PREPARE add_reason;

SET @add_chain = IF(EXISTS(SELECT 1 FROM information_schema.columns
                            WHERE table_schema = DATABASE() AND table_name = 'saga_steps' AND column_name = 'request_id'),
    'DO 0', 'ALTER TABLE saga_steps ADD COLUMN request_id VARBINARY(270) NULL');
PREPARE add_chain FROM @add_chain;
EXECUTE add_chain;
DEALLOCATE PREPARE add_chain;

-- +goose Down
ALTER TABLE saga_steps DROP COLUMN request_id;
ALTER TABLE saga_instances DROP COLUMN undo_reason;
