-- name: look_around
-- One read-only look at everything that falls due by itself. $1: accept timeout, seconds; $2: who asks; $3: seconds
-- without a sign after which another scheduler does not count.
select (select extract(epoch from min(w.available_at) - now()) from rara.waiting w)::float8 as next_due_s,
       exists (select from rara.lease l
                where l.expires_at <= now()
                   or (l.accepted_at is null and l.granted_at <= now() - make_interval(secs => $1::float8)))
           as reclaimable,
       exists (select from rara.lease l
                where l.cancel_requested_at is null
                  and (l.deadline <= now() or l.attempt_deadline <= now()
                       or l.progress_at + l.progress_timeout <= now()))
           as leases_overdue,
       exists (select from rara.workflow_run r
                where r.deadline <= now() and r.ended_at is null and r.cancel_requested_at is null)
           as runs_overdue,
       exists (select from rara.ready r
                where least(r.deadline, r.schedule_deadline) <= now()
                  and (r.deadline is not null or r.schedule_deadline is not null))
           as ready_overdue,
       exists (select from rara.waiting w where w.deadline <= now() and w.deadline is not null) as waiting_overdue,
       exists (select from rara.ready) as any_ready,
       exists (select from rara.executor x
                where x.scheduler_id <> $2::uuid and x.ended_at is null
                  and x.last_seen_at > now() - make_interval(secs => $3::float8)) as others_known,
       coalesce((select max(route_id) from rara.route), 0) as newest_route_id,
       (select string_agg(p.pause_id || case when p.resumed_at is null then '' else '-' end, ' ' order by p.pause_id)
          from rara.pause p) as pauses;

-- name: reclaimable_leases
-- A page of leases that have expired or were never taken up, behind step $2. Finding is not deciding: the commit
-- looks again under locks. $1: accept timeout, seconds.
select l.step_run_id::text, l.workflow_run_id::text, l.lease_token, l.executor_id::text,
       l.accepted_at is null as unaccepted
  from rara.lease l
 where (l.expires_at <= now()
        or (l.accepted_at is null and l.granted_at <= now() - make_interval(secs => $1::float8)))
   and l.step_run_id > $2::uuid
 order by l.step_run_id
 limit $3::int;

-- name: overdue_leases
-- A page of leases that ran out of a time of their own, and why, behind step $1.
select l.step_run_id::text, l.lease_token, l.executor_id::text, r.definition, r.definition_version, s.step_name,
       case when l.deadline <= now() then 'DEADLINE_EXCEEDED'
            when l.attempt_deadline <= now() then 'ATTEMPT_TIMEOUT'
            else 'PROGRESS_TIMEOUT' end as reason
  from rara.lease l
  join rara.step_run s on s.step_run_id = l.step_run_id
  join rara.workflow_run r on r.workflow_run_id = l.workflow_run_id
 where l.cancel_requested_at is null
   and (l.deadline <= now() or l.attempt_deadline <= now() or l.progress_at + l.progress_timeout <= now())
   and l.step_run_id > $1::uuid
 order by l.step_run_id
 limit $2::int;

-- name: mark_leases
-- Store the wish that these leases (step $1, token $2) end, for the reason $3, with $4 seconds of grace.
with held as materialized (
    select l.step_run_id, c.reason, c.grace_s
      from unnest($1::uuid[], $2::bigint[], $3::text[], $4::float8[]) c(step_run_id, lease_token, reason, grace_s)
      join rara.lease l on l.step_run_id = c.step_run_id and l.lease_token = c.lease_token
     where l.cancel_requested_at is null
     order by l.step_run_id
       for update of l skip locked
)
update rara.lease l
   set cancel_requested_at = now(), cancel_reason = h.reason, cancel_grace = make_interval(secs => h.grace_s)
  from held h
 where l.step_run_id = h.step_run_id
returning l.lease_token, l.executor_id::text, l.cancel_reason, extract(epoch from l.cancel_grace)::float8 as cancel_grace_s;

-- name: due_steps
-- A page of waiting steps whose time has come, behind ($1, $2).
select w.step_run_id::text, w.workflow_run_id::text, w.available_at
  from rara.waiting w
 where w.available_at <= now() and (w.available_at, w.step_run_id) > ($1::timestamptz, $2::uuid)
 order by w.available_at, w.step_run_id
 limit $3::int;

-- name: promote_steps
-- The waiting steps $1 become leasable. Under their runs' locks, where no cancel is asked for.
with free as materialized (
    select w.step_run_id
      from rara.waiting w
     where w.step_run_id = any($1::uuid[]) and w.available_at <= now()
       for update skip locked
), due as (
    delete from rara.waiting w using free f where w.step_run_id = f.step_run_id returning w.*
)
insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, attempt, failures, free_endings, reason,
                        released_at, deadline, schedule_deadline, revision)
select d.route_id, now(), d.step_run_id, d.workflow_run_id, d.attempt, d.failures, d.free_endings, d.reason,
       d.released_at, d.deadline, now() + s.schedule_timeout, d.revision
  from due d
  join rara.step_run s on s.step_run_id = d.step_run_id
returning step_run_id::text;

-- name: overdue_runs
-- A page of runs beyond their deadline, behind ($1, $2).
select r.workflow_run_id::text, r.deadline
  from rara.workflow_run r
 where r.deadline <= now() and r.ended_at is null and r.cancel_requested_at is null
   and (r.deadline, r.workflow_run_id) > ($1::timestamptz, $2::uuid)
 order by r.deadline, r.workflow_run_id
 limit $3::int;

-- name: overdue_steps
-- A page of steps that wait beyond their deadline, or beyond the wait for a capable executor, behind step $1.
-- $2: routes without one. Steps that only wait for a capable executor to be free are no part of any page.
select o.step_run_id::text, o.workflow_run_id::text, coalesce(o.deadline <= now(), false) as past_deadline
  from (select r.step_run_id, r.workflow_run_id, r.deadline
          from rara.ready r
         where least(r.deadline, r.schedule_deadline) <= now()
           and (r.deadline is not null or r.schedule_deadline is not null)
           and (r.deadline <= now() or r.route_id = any($2::int[]))
        union all
        select w.step_run_id, w.workflow_run_id, w.deadline
          from rara.waiting w
         where w.deadline <= now() and w.deadline is not null) o
 where o.step_run_id > $1::uuid
 order by o.step_run_id
 limit $3::int;

-- name: live_offers
-- What executors offer that are connected or may be on their way back: seen within $1 seconds, not draining or gone.
-- Equal offers are one.
select distinct x.executor_kind, x.capabilities::text as capabilities, x.labels::text as labels
  from rara.executor x
 where not x.draining
   and greatest(x.last_seen_at, x.ended_at) > now() - make_interval(secs => $1::float8);
