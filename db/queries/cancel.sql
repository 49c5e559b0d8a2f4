-- Closing steps that no executor holds. Always under the run's lock, and always waiting, ready, leases in this
-- order, each in a statement of its own: a step moves from waiting to ready to lease without the run's lock being
-- asked, so looking in the same direction misses none.

-- name: close_waiting_steps
-- Runs $1, reasons $2, revisions $3.
with gone as (
    delete from rara.waiting w
     using unnest($1::uuid[], $2::text[], $3::bigint[]) c(workflow_run_id, reason, revision), rara.step_run s
     where s.workflow_run_id = c.workflow_run_id and w.step_run_id = s.step_run_id
    returning w.*, c.reason as why, c.revision as at_revision
)
insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, released_at,
                         deadline, error, ended_at)
select g.step_run_id, g.workflow_run_id, 'cancelled', g.why, g.at_revision, g.attempt, g.failures, g.released_at,
       g.deadline, (select a.error from rara.step_attempt a where a.step_run_id = g.step_run_id and a.attempt = g.attempt),
       now()
  from gone g
returning step_run_id::text, workflow_run_id::text, reason;

-- name: close_ready_steps
with gone as (
    delete from rara.ready r
     using unnest($1::uuid[], $2::text[], $3::bigint[]) c(workflow_run_id, reason, revision), rara.step_run s
     where s.workflow_run_id = c.workflow_run_id and r.step_run_id = s.step_run_id
    returning r.*, c.reason as why, c.revision as at_revision
)
insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, released_at,
                         deadline, error, ended_at)
select g.step_run_id, g.workflow_run_id, 'cancelled', g.why, g.at_revision, g.attempt, g.failures, g.released_at,
       g.deadline, (select a.error from rara.step_attempt a where a.step_run_id = g.step_run_id and a.attempt = g.attempt),
       now()
  from gone g
returning step_run_id::text, workflow_run_id::text, reason;

-- name: close_blocked_steps
-- All other steps of the runs that are neither closed nor leased: they stand behind their dependencies.
-- Runs $1, reasons $2, revisions $3; ($4, $5): steps, by run and name, that stand behind one that failed.
insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, ended_at)
select s.step_run_id, s.workflow_run_id, 'cancelled',
       case when exists (select from unnest($4::uuid[], $5::text[]) u(workflow_run_id, step_name)
                          where u.workflow_run_id = s.workflow_run_id and u.step_name = s.step_name)
            then 'UPSTREAM_FAILED' else c.reason end,
       c.revision, 0, 0, now()
  from unnest($1::uuid[], $2::text[], $3::bigint[]) c(workflow_run_id, reason, revision)
  join rara.step_run s on s.workflow_run_id = c.workflow_run_id
 where not exists (select from rara.result x where x.step_run_id = s.step_run_id)
   and not exists (select from rara.lease l where l.step_run_id = s.step_run_id)
    on conflict do nothing
returning step_run_id::text, workflow_run_id::text, reason;

-- name: close_steps_behind
-- In a run that goes on: the steps, by run $1 and name $2, that stand behind one that ended without success.
insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, ended_at)
select s.step_run_id, s.workflow_run_id, 'cancelled', 'UPSTREAM_FAILED', c.revision, 0, 0, now()
  from unnest($1::uuid[], $2::text[], $3::bigint[]) c(workflow_run_id, step_name, revision)
  join rara.step_run s on s.workflow_run_id = c.workflow_run_id and s.step_name = c.step_name
    on conflict do nothing
returning step_run_id::text, workflow_run_id::text, reason;

-- name: close_overdue_steps
-- Steps $1 that wait beyond their time, for the reasons $2, at the revisions $3. Of the rows found, those still there
-- that nobody holds.
with target as (
    select * from unnest($1::uuid[], $2::text[], $3::bigint[]) t(step_run_id, why, at_revision)
), free_waiting as materialized (
    select t.* from target t join rara.waiting w on w.step_run_id = t.step_run_id for update of w skip locked
), free_ready as materialized (
    select t.* from target t join rara.ready r on r.step_run_id = t.step_run_id for update of r skip locked
), from_waiting as (
    delete from rara.waiting w using free_waiting t
     where w.step_run_id = t.step_run_id and t.why = 'DEADLINE_EXCEEDED' and w.deadline <= now()
    returning w.step_run_id, w.workflow_run_id, w.attempt, w.failures, w.released_at, w.deadline, t.why, t.at_revision
), from_ready as (
    delete from rara.ready r using free_ready t
     where r.step_run_id = t.step_run_id
       and case t.why when 'DEADLINE_EXCEEDED' then r.deadline else r.schedule_deadline end <= now()
    returning r.step_run_id, r.workflow_run_id, r.attempt, r.failures, r.released_at, r.deadline, t.why, t.at_revision
), gone as (
    select * from from_waiting union all select * from from_ready
)
insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, released_at,
                         deadline, error, ended_at)
select g.step_run_id, g.workflow_run_id, 'cancelled', g.why, g.at_revision, g.attempt, g.failures, g.released_at,
       g.deadline, (select a.error from rara.step_attempt a where a.step_run_id = g.step_run_id and a.attempt = g.attempt),
       now()
  from gone g
returning step_run_id::text, workflow_run_id::text, reason;

-- name: mark_leases_of_runs
-- Ask for the end of every lease of the runs $1 (reason $2, grace $3 or the step's own of $4, else $5), but for the
-- steps $6, which end in this transaction. A run's wish outranks an attempt's own timeout.
update rara.lease l
   set cancel_requested_at = coalesce(l.cancel_requested_at, now()),
       cancel_reason = c.reason,
       cancel_grace = make_interval(secs => coalesce(c.grace_s, (c.graces::jsonb ->> s.step_name)::float8, $5::float8))
  from unnest($1::uuid[], $2::text[], $3::float8[], $4::text[]) c(workflow_run_id, reason, grace_s, graces)
  join rara.step_run s on s.workflow_run_id = c.workflow_run_id
 where l.step_run_id = s.step_run_id
   and l.step_run_id <> all($6::uuid[])
   and (l.cancel_requested_at is null or l.cancel_reason in ('ATTEMPT_TIMEOUT', 'PROGRESS_TIMEOUT'))
returning l.lease_token, l.executor_id::text, l.cancel_reason, extract(epoch from l.cancel_grace)::float8 as cancel_grace_s;

-- name: request_cancel
-- Store the intent first. A run whose cancel was asked for already keeps the first wish.
update rara.workflow_run
   set cancel_requested_at = now(), cancel_reason = $2, cancel_message = $3
 where workflow_run_id = $1::uuid and ended_at is null and cancel_requested_at is null
returning workflow_run_id::text;

-- name: update_runs
-- The new standing of runs after closings outside a batch. Same columns as in apply_batch.
update rara.workflow_run w
   set state = r.state, revision = r.revision, steps_succeeded = r.steps_succeeded, steps_failed = r.steps_failed,
       steps_cancelled = r.steps_cancelled,
       ended_at = case when r.state in ('succeeded', 'failed', 'cancelled') then now() end,
       failed_step_run_id = coalesce(w.failed_step_run_id, r.failed_step_run_id),
       cancel_requested_at = case when r.cancel_reason is null then w.cancel_requested_at
                                  else coalesce(w.cancel_requested_at, now()) end,
       cancel_reason = coalesce(w.cancel_reason, r.cancel_reason)
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::int[], $5::int[], $6::int[], $7::uuid[], $8::text[])
       r(workflow_run_id, state, revision, steps_succeeded, steps_failed, steps_cancelled, failed_step_run_id,
         cancel_reason)
 where w.workflow_run_id = r.workflow_run_id and w.revision = r.revision - 1
returning w.workflow_run_id::text;

-- name: step_names
select step_run_id::text, step_name from rara.step_run where step_run_id = any($1::uuid[]);
