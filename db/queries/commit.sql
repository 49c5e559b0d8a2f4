-- What turns reports about leases into stored history, states and results. One transaction runs:
-- lock_runs_and_read_leases (of many leases lock_runs and read_leases, or lock_leases), decide (in domain/attempt.py),
-- [lock_blobs, known_sequences, cascades], apply_batch, [record_*, release_dependants].

-- name: lock_runs
-- Runs before leases everywhere, each by id.
select workflow_run_id::text, state as run_state, revision, steps_total, steps_succeeded, steps_failed,
       steps_cancelled, on_failure, cancel_reason as run_cancel_reason, definition, definition_version,
       failed_step_run_id::text
  from rara.workflow_run
 where workflow_run_id = any($1::uuid[])
 order by workflow_run_id
   for no key update;

-- name: lock_runs_skip_locked
-- For sweeps: a run that somebody is at work on is left for the next turn.
select workflow_run_id::text, state as run_state, revision, steps_total, steps_succeeded, steps_failed,
       steps_cancelled, on_failure, cancel_reason as run_cancel_reason, definition, definition_version,
       failed_step_run_id::text
  from rara.workflow_run
 where workflow_run_id = any($1::uuid[])
 order by workflow_run_id
   for no key update skip locked;

-- name: read_leases
-- The leases of the steps $2, as far as their runs are among $1, which are locked: nobody else ends a lease of theirs
-- or stores events under it. It may be renewed, and be asked to end, until apply_batch takes it. $3: accept timeout,
-- seconds.
select l.step_run_id::text, l.workflow_run_id::text, l.lease_token, l.attempt, l.failures, l.free_endings,
       l.executor_id::text, l.granted_on, l.accepted_at is not null as accepted, l.started_at is not null as started,
       l.last_sequence, l.gaps, l.cancel_reason, l.expires_at <= now() as expired,
       l.granted_at <= now() - make_interval(secs => $3::float8) as accept_overdue, s.step_name, s.idempotency_key
  from rara.lease l
  join rara.step_run s on s.step_run_id = l.step_run_id
 where l.step_run_id = any($2::uuid[]) and l.workflow_run_id = any($1::uuid[]);

-- name: lock_runs_and_read_leases
-- Both at once, a row for each lease and one for a run of which there is none: the columns of lock_runs, whether the
-- leases are those of the run as it was locked, and the columns of read_leases. The leases are read as they were when
-- the statement began, the run as it is after the wait for it: where a commit came between, its revision has moved, and
-- read_leases has to be asked. Leases that are granted meanwhile have nothing to say yet.
with run as materialized (
    select workflow_run_id, state, revision, steps_total, steps_succeeded, steps_failed, steps_cancelled, on_failure,
           cancel_reason, definition, definition_version, failed_step_run_id
      from rara.workflow_run
     where workflow_run_id = any($1::uuid[])
     order by workflow_run_id
       for no key update
), named as materialized (
    select l.*, s.step_name, s.idempotency_key
      from unnest($2::uuid[]) as g (step_run_id)
     cross join lateral (select h.* from rara.lease h where h.step_run_id = g.step_run_id offset 0) as l
      join rara.step_run s on s.step_run_id = l.step_run_id
)
select r.workflow_run_id::text, r.state as run_state, r.revision, r.steps_total, r.steps_succeeded, r.steps_failed,
       r.steps_cancelled, r.on_failure, r.cancel_reason as run_cancel_reason, r.definition, r.definition_version,
       r.failed_step_run_id::text,
       r.revision = (select w.revision from rara.workflow_run w where w.workflow_run_id = r.workflow_run_id)
           as is_settled,
       l.step_run_id::text, l.workflow_run_id::text as lease_run_id, l.lease_token, l.attempt, l.failures,
       l.free_endings, l.executor_id::text, l.granted_on, l.accepted_at is not null as accepted,
       l.started_at is not null as started, l.last_sequence, l.gaps, l.cancel_reason, l.expires_at <= now() as expired,
       l.granted_at <= now() - make_interval(secs => $3::float8) as accept_overdue, l.step_name, l.idempotency_key
  from run r
  left join named l on l.workflow_run_id = r.workflow_run_id;

-- name: lock_leases
-- The same as read_leases, so that they stay as they are. Under READ COMMITTED they come back as they are after the
-- wait; one that is gone is simply not there.
select l.step_run_id::text, l.workflow_run_id::text, l.lease_token, l.attempt, l.failures, l.free_endings,
       l.executor_id::text, l.granted_on, l.accepted_at is not null as accepted, l.started_at is not null as started,
       l.last_sequence, l.gaps, l.cancel_reason, l.expires_at <= now() as expired,
       l.granted_at <= now() - make_interval(secs => $3::float8) as accept_overdue, s.step_name, s.idempotency_key
  from rara.lease l
  join rara.step_run s on s.step_run_id = l.step_run_id
 where l.step_run_id = any($2::uuid[]) and l.workflow_run_id = any($1::uuid[])
 order by l.step_run_id
   for update of l;

-- name: lock_leases_skip_locked
-- For sweeps.
select l.step_run_id::text, l.workflow_run_id::text, l.lease_token, l.attempt, l.failures, l.free_endings,
       l.executor_id::text, l.granted_on, l.accepted_at is not null as accepted, l.started_at is not null as started,
       l.last_sequence, l.gaps, l.cancel_reason, l.expires_at <= now() as expired,
       l.granted_at <= now() - make_interval(secs => $3::float8) as accept_overdue, s.step_name, s.idempotency_key
  from rara.lease l
  join rara.step_run s on s.step_run_id = l.step_run_id
 where l.step_run_id = any($2::uuid[]) and l.workflow_run_id = any($1::uuid[])
 order by l.step_run_id
   for update of l skip locked;

-- name: known_sequences
-- Which of the numbers $4 of one attempt are stored.
select sequence
  from rara.step_event
 where granted_on = $1::date and step_run_id = $2::uuid and attempt = $3::int and sequence = any($4::bigint[]);

-- name: classify_late
-- Events (step $1, token $2, sequence $3, by executor $4) under tokens that hold no lease now: is each stored already?
-- A fresh statement, so that what another scheduler has just committed is seen.
with late as (
    select step_run_id, lease_token, sequence, executor_id, n
      from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::uuid[])
           with ordinality t(step_run_id, lease_token, sequence, executor_id, n)
), closed as (
    select t.n, t.step_run_id, t.sequence, x.granted_on, x.attempt, x.last_sequence
      from late t
      join rara.result x on x.step_run_id = t.step_run_id and x.lease_token = t.lease_token
                        and x.executor_id = t.executor_id
    union all
    select t.n, t.step_run_id, t.sequence, a.granted_on, a.attempt, a.last_sequence
      from late t
      join rara.step_attempt a on a.step_run_id = t.step_run_id and a.lease_token = t.lease_token
                              and a.executor_id = t.executor_id
)
select c.n::int, c.last_sequence,
       exists (select from rara.step_event e
                where e.granted_on = c.granted_on and e.step_run_id = c.step_run_id
                  and e.attempt = c.attempt and e.sequence = c.sequence) as stored
  from closed c;

-- name: lock_blobs
-- Blobs that a manifest names, held against garbage collection until the commit.
select sha256, size_bytes
  from rara.blob
 where sha256 = any($1::text[]) and marked_at is null
 order by sha256
   for share;

-- name: apply_batch
-- Everything that one set of decisions writes: events, leases that go on, leases that end, runs.
-- The runs were locked by lock_runs; the tokens guard all the same.
-- A lease that was only read may have been renewed since, or asked to end. What goes on is written on top of either.
-- What ends must have been decided by what its row says ($45: whether it was asked to end when read; null: it is
-- locked), else it is left out, and whoever counts notices. One that changes while this statement waits for it has
-- moved: current minor versions of PostgreSQL look at the place again and leave it out, too; older ones go on.
-- Events come once: decide left out the numbers that are stored, and nobody else writes under these locks.
-- Each lease is looked up by its key before it is changed by its place (`limit 1` keeps the planner from joining the
-- other way round): where statistics say that the table is empty, it would go through all of it once for each row.
with event as (
    insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
    select * from unnest($1::date[], $2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::bytea[])
), going_on as (
    update rara.lease l
       set accepted_at = case when g.accept then coalesce(l.accepted_at, now()) else l.accepted_at end,
           expires_at = case when g.accept and l.accepted_at is null
                             then greatest(l.expires_at, now() + make_interval(secs => $18::float8))
                             else l.expires_at end,
           started_at = case when g.start then coalesce(l.started_at, now()) else l.started_at end,
           attempt_deadline = case when g.start and l.started_at is null and g.attempt_timeout_s is not null
                                   then now() + make_interval(secs => g.attempt_timeout_s)
                                   else l.attempt_deadline end,
           progress_timeout = case when g.start and l.started_at is null and g.progress_timeout_s is not null
                                   then make_interval(secs => g.progress_timeout_s)
                                   else l.progress_timeout end,
           progress_at = case when g.moved then now() else l.progress_at end,
           last_sequence = g.last_sequence,
           gaps = g.gaps,
           cancel_delivered_at = case when g.receipt and l.cancel_requested_at is not null
                                      then coalesce(l.cancel_delivered_at, now())
                                      else l.cancel_delivered_at end,
           revision = g.revision
      from unnest($7::uuid[], $8::bigint[], $9::bool[], $10::bool[], $11::bigint[], $12::int[], $13::bool[],
                  $14::bool[], $15::bigint[], $16::float8[], $17::float8[])
           g(step_run_id, lease_token, accept, start, last_sequence, gaps, moved, receipt, revision,
             attempt_timeout_s, progress_timeout_s)
     cross join lateral (
           select h.ctid as place
             from rara.lease h
            where h.step_run_id = g.step_run_id and h.lease_token = g.lease_token
            limit 1
           ) h
     where l.ctid = h.place
    returning l.step_run_id
), ending as materialized (
    select l.place, l.step_run_id, l.workflow_run_id, l.route_id, l.lease_token, l.attempt, l.executor_id,
           l.released_at, l.deadline, l.granted_at, l.granted_on, l.cancel_requested_at, l.cancel_reason,
           l.cancel_delivered_at, l.kind_version,
           case when c.accepted then coalesce(l.accepted_at, now()) else l.accepted_at end as accepted_at,
           case when c.started then coalesce(l.started_at, now()) else l.started_at end as started_at,
           c.outcome, c.reason, c.spent, c.failures, c.free_endings, c.delay_s, c.output,
           c.error::jsonb as error, c.last_sequence, c.gaps, c.confirmed, c.revision, c.schedule_timeout_s
      from unnest($19::uuid[], $20::bigint[], $21::text[], $22::text[], $23::bool[], $24::int[], $25::int[],
                  $26::float8[], $27::bytea[], $28::text[], $29::bigint[], $30::int[], $31::bool[], $32::bool[],
                  $33::bool[], $34::bigint[], $35::float8[], $45::bool[])
           c(step_run_id, lease_token, outcome, reason, spent, failures, free_endings, delay_s, output, error,
             last_sequence, gaps, accepted, started, confirmed, revision, schedule_timeout_s, asked)
     cross join lateral (
           select h.ctid as place, h.*
             from rara.lease h
            where h.step_run_id = c.step_run_id and h.lease_token = c.lease_token
            limit 1
           ) l
     where coalesce(c.asked = (l.cancel_requested_at is not null), true)
), ended as (
    -- Not what was asked to end since this statement began: what is written of it would not say so.
    delete from rara.lease
     where ctid = any(array(select place from ending))
       and (cancel_requested_at is null
            or ctid = any(array(select place from ending where cancel_requested_at is not null)))
    returning step_run_id
), closed as (
    insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, lease_token,
                             executor_id, granted_at, granted_on, accepted_at, started_at, last_sequence, gaps,
                             spent, cancel_requested_at, cancel_reason, cancel_delivered_at, cancel_confirmed_at,
                             released_at, deadline, output, error, ended_at, kind_version)
    select step_run_id, workflow_run_id, outcome, reason, revision, attempt, failures, lease_token,
           executor_id, granted_at, granted_on, accepted_at, started_at, last_sequence, gaps,
           spent, cancel_requested_at, cancel_reason, cancel_delivered_at,
           case when confirmed and cancel_requested_at is not null then now() end,
           released_at, deadline, output, error, now(), kind_version
      from ending
     where outcome in ('succeeded', 'terminal_failed', 'cancelled')
    returning step_run_id
), attempted as (
    insert into rara.step_attempt (granted_on, step_run_id, attempt, lease_token, executor_id, reason, spent, error,
                                   last_sequence, gaps, granted_at, accepted_at, started_at, ended_at,
                                   cancel_requested_at, cancel_reason, kind_version)
    select granted_on, step_run_id, attempt, lease_token, executor_id, reason, spent, error,
           last_sequence, gaps, granted_at, accepted_at, started_at, now(), cancel_requested_at, cancel_reason,
           kind_version
      from ending
     where outcome in ('ready', 'waiting')
), again as (
    insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, attempt, failures, free_endings,
                            reason, released_at, deadline, schedule_deadline, revision)
    select route_id, now(), step_run_id, workflow_run_id, attempt, failures, free_endings, reason, released_at,
           deadline, now() + make_interval(secs => schedule_timeout_s), revision
      from ending
     where outcome = 'ready'
), later as (
    insert into rara.waiting (step_run_id, workflow_run_id, route_id, available_at, attempt, failures, free_endings,
                              reason, released_at, deadline, revision)
    select step_run_id, workflow_run_id, route_id, now() + make_interval(secs => delay_s), attempt, failures,
           free_endings, reason, released_at, deadline, revision
      from ending
     where outcome = 'waiting'
), run as (
    update rara.workflow_run w
       set state = r.state,
           revision = r.revision,
           steps_succeeded = r.steps_succeeded,
           steps_failed = r.steps_failed,
           steps_cancelled = r.steps_cancelled,
           started_at = case when r.started then coalesce(w.started_at, now()) else w.started_at end,
           ended_at = case when r.state in ('succeeded', 'failed', 'cancelled') then now() end,
           failed_step_run_id = coalesce(w.failed_step_run_id, r.failed_step_run_id),
           cancel_requested_at = case when r.cancel_reason is null then w.cancel_requested_at
                                      else coalesce(w.cancel_requested_at, now()) end,
           cancel_reason = coalesce(w.cancel_reason, r.cancel_reason)
      from unnest($36::uuid[], $37::text[], $38::bigint[], $39::int[], $40::int[], $41::int[], $42::bool[],
                  $43::uuid[], $44::text[])
           r(workflow_run_id, state, revision, steps_succeeded, steps_failed, steps_cancelled, started,
             failed_step_run_id, cancel_reason)
     where w.workflow_run_id = r.workflow_run_id and w.revision = r.revision - 1
    returning w.workflow_run_id
)
select (select count(*) from run)::int as runs, (select count(*) from ended)::int as ended,
       (select count(*) from going_on)::int as going_on;

-- name: go_on_as_known
-- All that is written of one lease that goes on, decided by what was known of its run at revision $2 (ADR 0026). The
-- run, the lease and the events are written one after the other, each only where the one before was: nothing, if the run
-- has moved. A lease that was renewed or asked to end since is written on top of either, as by apply_batch.
--   run     $1 id, $2 revision, $3 state
--   lease   $4 step, $5 token, $6 whether it is taken up now, $7 for how many seconds then, $8 whether its handler starts
--           now, $9 and $10 attempt and progress timeout in seconds, $11 last sequence, $12 gaps, $13 whether it moved
--   events  $14 day of the grant, $15 attempt, $16 sequences, $17 types, $18 bodies
--   server  $19 when it was started that all this was known of
with run as (
    update rara.workflow_run
       set state = $3::text, revision = $2::bigint + 1,
           started_at = case when $6::bool then coalesce(started_at, now()) else started_at end
     where workflow_run_id = $1::uuid and revision = $2::bigint
       and exists (select from rara.lease where step_run_id = $4::uuid and lease_token = $5::bigint)
       and pg_postmaster_start_time() = $19::timestamptz
    returning workflow_run_id
), lease as (
    update rara.lease
       set accepted_at = case when $6::bool then coalesce(accepted_at, now()) else accepted_at end,
           expires_at = case when $6::bool and accepted_at is null
                             then greatest(expires_at, now() + make_interval(secs => $7::float8))
                             else expires_at end,
           started_at = case when $8::bool then coalesce(started_at, now()) else started_at end,
           attempt_deadline = case when $8::bool and started_at is null and $9::float8 is not null
                                   then now() + make_interval(secs => $9::float8)
                                   else attempt_deadline end,
           progress_timeout = case when $8::bool and started_at is null and $10::float8 is not null
                                   then make_interval(secs => $10::float8)
                                   else progress_timeout end,
           progress_at = case when $13::bool then now() else progress_at end,
           last_sequence = $11::bigint,
           gaps = $12::int,
           revision = $2::bigint + 1
     where step_run_id = $4::uuid and lease_token = $5::bigint and exists (select from run)
    returning step_run_id
), event as (
    insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
    select $14::date, l.step_run_id, $15::int, e.sequence, e.type, e.body
      from lease l, unnest($16::bigint[], $17::text[], $18::bytea[]) as e (sequence, type, body)
)
-- A run without its lease: an error, which undoes it.
select (select count(*) from run)::int as runs, pg_postmaster_start_time() as server,
       (case when (select count(*) from lease) = (select count(*) from run) then '1'
             else 'a lease has changed meanwhile: it is read, and decided on anew'
        end)::int as is_whole;

-- name: succeed_as_known
-- The same of one lease that ends well, with nothing else to record or to make ready. Not where it was asked to end.
--   run     $1 id, $2 revision, $3 state, $4 steps that have succeeded
--   lease   $5 step, $6 token, $7 whether it is taken up now, $8 whether its handler starts now, $9 last sequence,
--           $10 gaps, $11 failures, $12 whether the attempt is spent, $13 output
--   events  $14 day of the grant, $15 attempt, $16 sequences, $17 types, $18 bodies
--   server  $19 when it was started that all this was known of
with run as (
    update rara.workflow_run
       set state = $3::text, revision = $2::bigint + 1, steps_succeeded = $4::int,
           started_at = case when $7::bool then coalesce(started_at, now()) else started_at end,
           ended_at = case when $3::text in ('succeeded', 'failed', 'cancelled') then now() end
     where workflow_run_id = $1::uuid and revision = $2::bigint
       and exists (select from rara.lease
                    where step_run_id = $5::uuid and lease_token = $6::bigint and cancel_requested_at is null)
       and pg_postmaster_start_time() = $19::timestamptz
    returning workflow_run_id
), ended as (
    delete from rara.lease
     where step_run_id = $5::uuid and lease_token = $6::bigint and cancel_requested_at is null
       and exists (select from run)
    returning *
), closed as (
    insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, lease_token,
                             executor_id, granted_at, granted_on, accepted_at, started_at, last_sequence, gaps,
                             spent, released_at, deadline, output, ended_at, kind_version)
    select step_run_id, workflow_run_id, 'succeeded', '', $2::bigint + 1, attempt, $11::int, lease_token,
           executor_id, granted_at, granted_on,
           case when $7::bool then coalesce(accepted_at, now()) else accepted_at end,
           case when $8::bool then coalesce(started_at, now()) else started_at end,
           $9::bigint, $10::int, $12::bool, released_at, deadline, $13::bytea, now(), kind_version
      from ended
), event as (
    insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
    select $14::date, l.step_run_id, $15::int, e.sequence, e.type, e.body
      from ended l, unnest($16::bigint[], $17::text[], $18::bytea[]) as e (sequence, type, body)
)
select (select count(*) from run)::int as runs, pg_postmaster_start_time() as server,
       (case when (select count(*) from ended) = (select count(*) from run) then '1'
             else 'a lease has changed meanwhile: it is read, and decided on anew'
        end)::int as is_whole;

-- name: record_effects
-- What once() did; the first of a name stays.
insert into rara.effect (idempotency_key, name, result, step_run_id, attempt, lease_token)
select * from unnest($1::text[], $2::text[], $3::bytea[], $4::uuid[], $5::int[], $6::bigint[])
    on conflict do nothing;

-- name: record_checkpoints
-- The newest checkpoint per idempotency key: a later grant's, or a later one of the same grant. Its artifacts ($7 to
-- $13, by key) replace those of the one before; the artifacts of a checkpoint that came too late go with it.
with stored as (
    insert into rara.checkpoint as c (idempotency_key, step_run_id, attempt, lease_token, sequence, data)
    select * from unnest($1::text[], $2::uuid[], $3::int[], $4::bigint[], $5::bigint[], $6::bytea[])
        on conflict (idempotency_key) do update
       set step_run_id = excluded.step_run_id, attempt = excluded.attempt, lease_token = excluded.lease_token,
           sequence = excluded.sequence, data = excluded.data, stored_at = now()
     where (excluded.lease_token, excluded.sequence) > (c.lease_token, c.sequence)
    returning c.idempotency_key, c.lease_token, c.sequence
), replaced as (
    delete from rara.checkpoint_artifact o
     using stored s
     where o.idempotency_key = s.idempotency_key
)
insert into rara.checkpoint_artifact (idempotency_key, lease_token, sequence, name, position, sha256, size_bytes,
                                      media_type, type)
select s.idempotency_key, s.lease_token, s.sequence, a.name, a.position, a.sha256, a.size_bytes, a.media_type, a.type
  from unnest($7::text[], $8::text[], $9::int[], $10::text[], $11::bigint[], $12::text[], $13::text[])
       a(idempotency_key, name, position, sha256, size_bytes, media_type, type)
  join stored s on s.idempotency_key = a.idempotency_key;

-- name: record_artifacts
-- The manifests of attempts that end in this transaction.
insert into rara.artifact (step_run_id, attempt, name, position, sha256, size_bytes, media_type, type, inline,
                           metadata, lease_token)
select * from unnest($1::uuid[], $2::int[], $3::text[], $4::int[], $5::text[], $6::bigint[], $7::text[],
                     $8::text[], $9::bytea[], $10::bytea[], $11::bigint[]);

-- name: record_lineage
-- Only of attempts that succeeded. $9: comma-separated digests that an output was made from; empty: all inputs.
insert into rara.lineage (sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared, name,
                          derived_from)
select sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared, name,
       case when derived_from = '' then '{}'::text[] else string_to_array(derived_from, ',') end
  from unnest($1::text[], $2::bigint[], $3::uuid[], $4::uuid[], $5::int[], $6::bool[], $7::bool[], $8::text[],
              $9::text[])
       t(sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared, name, derived_from)
    on conflict do nothing;

-- name: release_dependants
-- Of the steps that may have become leasable (run $1, name $2), those whose dependencies have all succeeded.
-- Under the run's lock and in a later statement than the results: two committers cannot both see the other's
-- step unfinished.
insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, deadline,
                        schedule_deadline, revision)
select s.route_id, now(), s.step_run_id, s.workflow_run_id, now(), now() + make_interval(secs => c.timeout_s),
       now() + s.schedule_timeout, c.revision
  from unnest($1::uuid[], $2::text[], $3::float8[], $4::bigint[]) c(workflow_run_id, step_name, timeout_s, revision)
  join rara.step_run s on s.workflow_run_id = c.workflow_run_id and s.step_name = c.step_name
 where not exists (
           select
             from rara.step_dependency d
            where d.step_run_id = s.step_run_id
              and not exists (select from rara.result x
                               where x.step_run_id = d.depends_on_step_run_id and x.state = 'succeeded'))
   and not exists (select from rara.result x where x.step_run_id = s.step_run_id)
    on conflict do nothing
returning step_run_id::text;
