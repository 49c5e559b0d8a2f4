-- What is past retention: found in pages, and removed by functions that look again under locks.

-- name: retention_limit
-- The instant before which a run must have ended. $1: days.
select now() - make_interval(days => $1::int);

-- name: expired_runs
-- A page of runs that ended before $1, the newest first, so that a retry goes before what it retries; behind ($2, $3).
select w.workflow_run_id::text, w.ended_at, w.steps_total
  from rara.workflow_run w
 where w.ended_at < $1::timestamptz and (w.ended_at, w.workflow_run_id) < ($2::timestamptz, $3::uuid)
 order by w.ended_at desc, w.workflow_run_id desc
 limit $4::int;

-- name: expired
-- What pruning with $1 days would look at. Some of it stays: for a retry, a young key, a run that was still at work.
with days as (
    select c.oid, to_date(right(c.relname, 8), 'YYYYMMDD') as day
      from pg_inherits i
      join pg_class c on c.oid = i.inhrelid
     where i.inhparent in ('rara.step_event'::regclass, 'rara.step_attempt'::regclass)
       and c.relname ~ '^step_(event|attempt)_\d{8}$'
)
select (select count(*) from rara.workflow_run w where w.ended_at < l.before)::bigint as runs,
       (select coalesce(sum(w.steps_total), 0) from rara.workflow_run w where w.ended_at < l.before)::bigint as steps,
       (select min(w.ended_at) from rara.workflow_run w where w.ended_at < l.before) as oldest,
       (select count(*) from days d where d.day < (l.before at time zone 'UTC')::date)::int as partitions,
       (select coalesce(sum(pg_total_relation_size(d.oid)), 0) from days d
         where d.day < (l.before at time zone 'UTC')::date)::bigint as partition_bytes
  from (select now() - make_interval(days => $1::int) as before) l;

-- name: remove_runs
select runs, steps from rara.remove_runs($1::uuid[], $2::timestamptz);

-- name: remove_default_history
-- Up to $2 old rows of steps that are gone, which have no day of their own because it was missing when they came.
with events as (
    delete from rara.step_event_default d
     where d.ctid = any (array(select e.ctid from rara.step_event_default e
                                where e.granted_on < $1::date
                                  and not exists (select from rara.step_run s where s.step_run_id = e.step_run_id)
                                limit $2::int))
    returning 1
), attempts as (
    delete from rara.step_attempt_default d
     where d.ctid = any (array(select a.ctid from rara.step_attempt_default a
                                where a.granted_on < $1::date
                                  and not exists (select from rara.step_run s where s.step_run_id = a.step_run_id)
                                limit $2::int))
    returning 1
)
select (select count(*) from events) + (select count(*) from attempts);

-- name: drop_partition
-- The name of a history partition that was dropped; null: none can be.
select rara.drop_history_partition($1::int);

-- name: retention_succeeded
update rara.retention set last_success_at = now(), failed_cycles = 0, error = null;

-- name: retention_failed
update rara.retention set last_failure_at = now(), failed_cycles = failed_cycles + 1, error = $1::text;
