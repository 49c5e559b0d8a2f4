-- compatible-from: 0009
-- migrate:up transaction:false

-- What of one run waits, for who watches it: any number of other runs' steps may be in their backoff.
create index concurrently if not exists waiting_run on rara.waiting (workflow_run_id);

-- migrate:down transaction:false

drop index concurrently if exists rara.waiting_run;
