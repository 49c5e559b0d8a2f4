-- Starting and retrying runs: one statement each, so that nothing of a run can be leased before all of it is there.

-- name: start_runs
-- Runs, their steps and dependencies, what is ready, their artifacts and the callers' keys. A run whose key is taken
-- is not started, and its id does not come back. It waits for another start with the same key that has not committed
-- yet; keys are taken in order, so that two batches cannot wait for each other. Nor is a run started whose version has
-- to be the newest and is not. Arrays of one group are of equal length.
--   runs       $1 workflow_run_id, $2 definition, $3 version, $4 on_failure, $5 input, $6 labels, $7 traceparent,
--              $8 tracestate, $9 seconds to the deadline, $10 number of steps, $11 the key or null, $12 hash of the
--              request, $35 whether the version has to be the newest
--   steps      $13 run, $14 ids, $15 names, $16 routes, $17 idempotency keys, $18 schedule_timeout in seconds
--   edges      $19 run, $20 step, $21 depends on
--   ready      $22 run, $23 ids, $24 routes, $25 timeout in seconds, $26 schedule_timeout in seconds
--   artifacts  $27 run, $28 names, $29 sha256, $30 sizes, $31 media types, $32 types, $33 inline, $34 metadata
with given as materialized (
    select *
      from unnest($1::uuid[], $2::text[], $3::int[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::text[],
                  $9::float8[], $10::int[], $11::text[], $12::text[], $35::bool[])
           as g (workflow_run_id, definition, definition_version, on_failure, input, labels, traceparent, tracestate,
                 timeout_s, steps_total, idempotency_key, request_sha256, as_newest)
     where not as_newest
        or definition_version = (select max(d.version) from rara.definition d where d.definition = g.definition)
), key as (
    insert into rara.start_key (idempotency_key, request_sha256, workflow_run_id)
    select idempotency_key, request_sha256, workflow_run_id
      from given
     where idempotency_key is not null
     order by idempotency_key
    on conflict do nothing
    returning workflow_run_id
), run as (
    insert into rara.workflow_run (workflow_run_id, definition, definition_version, on_failure, input, labels,
                                   traceparent, tracestate, deadline, steps_total)
    select workflow_run_id, definition, definition_version, on_failure, input, labels::jsonb, traceparent, tracestate,
           now() + make_interval(secs => timeout_s), steps_total
      from given
     where idempotency_key is null or workflow_run_id in (select workflow_run_id from key)
    returning workflow_run_id, created_at, deadline
), step as (
    insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key, schedule_timeout)
    select s.step_run_id, workflow_run_id, s.step_name, s.route_id, s.idempotency_key,
           make_interval(secs => s.schedule_timeout_s)
      from unnest($13::uuid[], $14::uuid[], $15::text[], $16::int[], $17::text[], $18::float8[])
           as s (workflow_run_id, step_run_id, step_name, route_id, idempotency_key, schedule_timeout_s)
      join run using (workflow_run_id)
), edge as (
    insert into rara.step_dependency (step_run_id, depends_on_step_run_id)
    select e.step_run_id, e.depends_on
      from unnest($19::uuid[], $20::uuid[], $21::uuid[]) as e (workflow_run_id, step_run_id, depends_on)
      join run using (workflow_run_id)
), ready as (
    insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, deadline,
                            schedule_deadline, revision)
    select r.route_id, now(), r.step_run_id, workflow_run_id, now(), now() + make_interval(secs => r.timeout_s),
           now() + make_interval(secs => r.schedule_timeout_s), 1
      from unnest($22::uuid[], $23::uuid[], $24::int[], $25::float8[], $26::float8[])
           as r (workflow_run_id, step_run_id, route_id, timeout_s, schedule_timeout_s)
      join run using (workflow_run_id)
), artifact as (
    insert into rara.run_artifact (workflow_run_id, name, sha256, size_bytes, media_type, type, inline, metadata)
    select workflow_run_id, a.name, a.sha256, a.size_bytes, a.media_type, a.type, a.inline, a.metadata
      from unnest($27::uuid[], $28::text[], $29::text[], $30::bigint[], $31::text[], $32::text[], $33::bytea[],
                  $34::bytea[])
           as a (workflow_run_id, name, sha256, size_bytes, media_type, type, inline, metadata)
      join run using (workflow_run_id)
)
select workflow_run_id::text, created_at, deadline from run;

-- name: start_keys_get
select idempotency_key, workflow_run_id::text, request_sha256
  from rara.start_key
 where idempotency_key = any($1::text[]);

-- name: start_key_insert
-- A key for a run that exists already. No row back: the key is taken.
insert into rara.start_key (idempotency_key, request_sha256, workflow_run_id)
values ($1, $2, $3::uuid)
on conflict do nothing
returning workflow_run_id::text;

-- name: start_blobs_lock
-- Those of the digests $1 that are stored, kept from being marked for deletion until the start has committed.
select sha256, size_bytes
  from rara.blob
 where sha256 = any($1::text[]) and marked_at is null
 order by sha256
   for share;

-- name: retry_source
select state, definition, definition_version, traceparent, tracestate
  from rara.workflow_run
 where workflow_run_id = $1::uuid;

-- name: retry_source_steps
-- The steps of a closed run: its own, and those it reuses, with how they ended.
select s.step_run_id::text, s.step_name, s.idempotency_key, coalesce(x.state = 'succeeded', false) as succeeded
  from (select step_run_id from rara.step_run where workflow_run_id = $1::uuid
        union all
        select step_run_id from rara.reused_step where workflow_run_id = $1::uuid) as o
  join rara.step_run s on s.step_run_id = o.step_run_id
  left join rara.result x on x.step_run_id = o.step_run_id;

-- name: retry_live
-- The retry of a run that has not ended.
select workflow_run_id::text
  from rara.workflow_run
 where retry_of_workflow_run_id = $1::uuid and ended_at is null;

-- name: retry_run
-- A new run of the same version, input, labels, artifacts and time to the deadline. No row back: the key is taken,
-- or $2 has a live retry already; it waits for one that has not committed yet.
--   run        $1 workflow_run_id, $2 of which it is a retry, $3 ids of the steps reused
--   key        $4 the key or null, $5 hash of the request
--   steps      $6 ids, $7 names, $8 routes, $9 idempotency keys, $10 schedule_timeout in seconds, $11 the step that
--              each goes on for, or null
--   edges      $12 step, $13 depends on
--   ready      $14 ids, $15 routes, $16 timeout in seconds, $17 schedule_timeout in seconds
--   trace      $18 traceparent, $19 tracestate
with run as (
    insert into rara.workflow_run (workflow_run_id, retry_of_workflow_run_id, definition, definition_version,
                                   on_failure, input, labels, traceparent, tracestate, deadline, steps_total,
                                   steps_succeeded)
    select $1::uuid, o.workflow_run_id, o.definition, o.definition_version, o.on_failure, o.input, o.labels,
           $18::text, $19::text, now() + (o.deadline - o.created_at),
           cardinality($6::uuid[]) + cardinality($3::uuid[]), cardinality($3::uuid[])
      from rara.workflow_run o
     where o.workflow_run_id = $2::uuid
       and o.state in ('failed', 'cancelled')
       and not exists (select from rara.start_key k where k.idempotency_key = $4::text)
    on conflict (retry_of_workflow_run_id) where retry_of_workflow_run_id is not null and ended_at is null
    do nothing
    returning workflow_run_id
), reused as (
    insert into rara.reused_step (workflow_run_id, step_run_id)
    select run.workflow_run_id, u.step_run_id
      from run, unnest($3::uuid[]) as u (step_run_id)
), key as (
    insert into rara.start_key (idempotency_key, request_sha256, workflow_run_id)
    select $4::text, $5::text, run.workflow_run_id
      from run
     where $4::text is not null
), step as (
    insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key, schedule_timeout,
                               retry_of_step_run_id)
    select s.step_run_id, run.workflow_run_id, s.step_name, s.route_id, s.idempotency_key,
           make_interval(secs => s.schedule_timeout_s), s.retry_of
      from run,
           unnest($6::uuid[], $7::text[], $8::int[], $9::text[], $10::float8[], $11::uuid[])
           as s (step_run_id, step_name, route_id, idempotency_key, schedule_timeout_s, retry_of)
), edge as (
    insert into rara.step_dependency (step_run_id, depends_on_step_run_id)
    select e.step_run_id, e.depends_on
      from run, unnest($12::uuid[], $13::uuid[]) as e (step_run_id, depends_on)
), ready as (
    insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, deadline,
                            schedule_deadline, revision)
    select r.route_id, now(), r.step_run_id, run.workflow_run_id, now(), now() + make_interval(secs => r.timeout_s),
           now() + make_interval(secs => r.schedule_timeout_s), 1
      from run,
           unnest($14::uuid[], $15::int[], $16::float8[], $17::float8[])
           as r (step_run_id, route_id, timeout_s, schedule_timeout_s)
), artifact as (
    insert into rara.run_artifact (workflow_run_id, name, sha256, size_bytes, media_type, type, inline, metadata)
    select run.workflow_run_id, a.name, a.sha256, a.size_bytes, a.media_type, a.type, a.inline, a.metadata
      from run, rara.run_artifact a
     where a.workflow_run_id = $2::uuid
)
select workflow_run_id::text from run;
