-- compatible-from: 0009
-- migrate:up transaction:false

-- Steps that were leased before and are ready again, for who watches their run. Of the hot rows, those of first attempts,
-- it holds none.
create index concurrently if not exists ready_again on rara.ready (workflow_run_id) where attempt > 0;

-- migrate:down transaction:false

drop index concurrently if exists rara.ready_again;
