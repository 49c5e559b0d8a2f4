-- The life of :steps steps in five commits: stored and ready, leased, running, half way, succeeded.
\set first random(1, :runs)
with made as (
    insert into life_step (run_id, kind, input)
    select 1 + (:first + n / 10) % :runs, 'bench.noop', convert_to(format('{"page": %s, "of": "a small input, as most are"}', n), 'UTF8')
      from generate_series(1, :steps) n
    returning step_id
)
insert into life_ready (priority, step_id) select 0, step_id from made;

with next as (
    select priority, step_id from life_ready order by priority, step_id limit :steps for update skip locked
), taken as (
    delete from life_ready r using next n where r.priority = n.priority and r.step_id = n.step_id
    returning r.step_id
), leased as (
    insert into life_lease (step_id, token, owner, attempt, granted_at)
    select step_id, nextval('life_token'), :client_id::int, 1, now() from taken
    returning step_id
)
select coalesce(array_agg(step_id), '{}') as mine from leased \gset

with started as (
    update life_lease set started_at = now()
     where step_id = any(:mine::bigint[]) and owner = :client_id::int and started_at is null
    returning step_id, attempt
)
insert into life_event (step_id, attempt, sequence, type) select step_id, attempt, 1, 'running' from started;

insert into life_event (step_id, attempt, sequence, type, body)
select step_id, attempt, 2, 'progress', convert_to('{"fraction": 0.5, "message": "half way"}', 'UTF8')
  from life_lease
 where step_id = any(:mine::bigint[]) and owner = :client_id::int;

with ended as (
    delete from life_lease where step_id = any(:mine::bigint[]) and owner = :client_id::int
    returning step_id, token, attempt
), closed as (
    insert into life_result (step_id, token, output, ended_at)
    select step_id, token, convert_to('{"pages": 12, "digest": "sha256-0123456789abcdef"}', 'UTF8'), now() from ended
), told as (
    insert into life_event (step_id, attempt, sequence, type) select step_id, attempt, 3, 'succeeded' from ended
), counted as (
    select s.run_id, count(*) as steps from ended e join life_step s using (step_id) group by s.run_id
), held as materialized (
    select r.run_id from life_run r join counted using (run_id) order by r.run_id for update of r
)
update life_run r set succeeded = r.succeeded + c.steps
  from counted c join held using (run_id) where r.run_id = c.run_id;
