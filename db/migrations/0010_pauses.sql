-- compatible-from: 0009
-- migrate:up

-- What nothing is leased of. A paused kind is left out by the schedulers, route by route. Ready steps of a paused
-- definition share routes with others, so they step aside: under the negative of pause_id as their route_id in `ready`,
-- where no lease looks, everything else finds them by their id, and the order in which they came is kept. ADR 0017.
create table rara.pause (
    pause_id int generated always as identity primary key,
    kind text check (length(kind) between 1 and 128),
    definition text check (length(definition) between 1 and 63),
    reason text not null default '' check (length(reason) <= 1000),
    paused_by text not null default '', -- the name of a token; empty: nobody was asked for one
    paused_at timestamptz not null default now(),
    resumed_at timestamptz, -- over; the row goes when what stood aside is back
    check (num_nonnulls(kind, definition) = 1)
);
create unique index pause_kind on rara.pause (kind) where resumed_at is null; -- one pause of a kind
create unique index pause_definition on rara.pause (definition) where resumed_at is null;

-- What calls on many runs select by. No run that goes well is in the first two, and no column that changes while a run
-- goes well is part of them: updates of runs stay HOT. Built in place: no release has many runs yet.
-- squawk-ignore require-concurrent-index-creation
create index workflow_run_unsuccessful on rara.workflow_run (ended_at, workflow_run_id)
    where ended_at is not null and (failed_step_run_id is not null or cancel_reason is not null); -- unsuccessful_runs
-- squawk-ignore require-concurrent-index-creation
create index workflow_run_unsuccessful_of on rara.workflow_run (definition, ended_at, workflow_run_id)
    where ended_at is not null and (failed_step_run_id is not null or cancel_reason is not null); -- unsuccessful_runs_of
-- squawk-ignore require-concurrent-index-creation
create index workflow_run_open on rara.workflow_run (created_at, workflow_run_id)
    where ended_at is null; -- open_runs

-- migrate:down

drop index rara.workflow_run_open;
drop index rara.workflow_run_unsuccessful_of;
drop index rara.workflow_run_unsuccessful;
-- Steps that stood aside are ready again.
update rara.ready r set route_id = s.route_id from rara.step_run s where r.route_id < 0 and s.step_run_id = r.step_run_id;
drop table rara.pause;
