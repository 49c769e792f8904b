-- The steps a saga started with: a definition that is edited in place instead of getting a new
-- version must be noticed, or a saga would skip a step, or be completed with one missing.

-- +goose NO TRANSACTION
-- +goose Up
-- MySQL has no ADD COLUMN IF NOT EXISTS, and every statement must be able to run twice.
SET @add_plan = IF(EXISTS(SELECT 1 FROM information_schema.columns
                           WHERE table_schema = DATABASE() AND table_name = 'saga_instances' AND column_name = 'plan'),
    'DO 0',
    'ALTER TABLE saga_instances ADD COLUMN plan BLOB NULL COMMENT ''steps at its start; NULL: from before this column''');
PREPARE add_plan FROM @add_plan;
EXECUTE add_plan;
DEALLOCATE PREPARE add_plan;

-- +goose Down
ALTER TABLE saga_instances DROP COLUMN plan;
