-- compatible-from: 0009
-- migrate:up

-- Until when a drained executor's jobs may run, as an operator has said: whoever holds its session tells it.
alter table rara.executor add column drain_by timestamptz;

-- migrate:down

alter table rara.executor drop column drain_by;
