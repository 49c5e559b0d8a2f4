-- What changed, for those who watch.

-- name: watch_settled_runs
-- Those of the runs $1 of which there is something to tell: they have ended, or do not exist.
select i.workflow_run_id::text, w.workflow_run_id is not null as is_known
  from unnest($1::uuid[]) as i (workflow_run_id)
  left join rara.workflow_run w on w.workflow_run_id = i.workflow_run_id
 where w.workflow_run_id is null or w.ended_at is not null;

-- name: watch_run_look
-- Where the run $1 stands, and its steps that changed after revision $2, or are leased: a grant touches no run row, so
-- it raises no revision. In the order of what happened. A step of a first attempt becomes ready in the commit of what it
-- depends on, so it is found from there, and the cost is that of what changed, however many steps are open.
-- Leases have no index by run, which every grant would pay for. Small runs, of which many are watched at one time, ask
-- by step; it takes more than 100 probes to cost what reading 10,000 leases does.
with ended as materialized (
    select x.step_run_id, x.revision
      from rara.result x
     where x.workflow_run_id = $1::uuid and x.revision > $2
), changed as (
    select e.step_run_id, e.revision
      from ended e
    union all
    select s.step_run_id, l.revision
      from rara.workflow_run r
      join rara.step_run s on s.workflow_run_id = r.workflow_run_id
     cross join lateral (select h.revision from rara.lease h where h.step_run_id = s.step_run_id offset 0) as l
     where r.workflow_run_id = $1::uuid and r.steps_total <= 100
    union all
    select l.step_run_id, l.revision
      from rara.lease l
     where l.workflow_run_id = $1::uuid
       and (select r.steps_total > 100 from rara.workflow_run r where r.workflow_run_id = $1::uuid)
    union all
    select w.step_run_id, w.revision
      from rara.waiting w
     where w.workflow_run_id = $1::uuid and w.revision > $2
    union all
    select r.step_run_id, r.revision
      from rara.ready r
     where r.workflow_run_id = $1::uuid and r.attempt > 0 and r.revision > $2
    union all
    select r.step_run_id, r.revision
      from (select distinct d.step_run_id
              from ended e
              join rara.step_dependency d on d.depends_on_step_run_id = e.step_run_id) b
      join rara.ready r on r.step_run_id = b.step_run_id
     where r.attempt = 0 and r.revision > $2
)
select w.state, w.revision,
       array(select c.step_run_id::text from changed c order by c.revision, c.step_run_id) as step_run_ids
  from rara.workflow_run w
 where w.workflow_run_id = $1::uuid;

-- name: watch_attempt
-- Attempt $2 of the step $1: where its events are, its token, whether it is over, and whose it is. No row: it never was,
-- or is yet to come.
select a.granted_on, a.lease_token, a.is_over, a.executor_id::text, coalesce(e.executor_name, '') as executor_name
  from (select executor_id, attempt, granted_on, lease_token, true as is_over
          from rara.step_attempt
         where step_run_id = $1::uuid and attempt = $2
        union all
        select executor_id, attempt, granted_on, lease_token, true
          from rara.result
         where step_run_id = $1::uuid and attempt = $2 and lease_token is not null
        union all
        select executor_id, attempt, granted_on, lease_token, false
          from rara.lease
         where step_run_id = $1::uuid and attempt = $2) as a
  left join rara.executor e on e.executor_id = a.executor_id
 limit 1;

-- name: watch_events
-- Up to $5 events of attempt $3 behind the sequence number $4, in order.
select sequence, body
  from rara.step_event
 where granted_on = $1::date and step_run_id = $2::uuid and attempt = $3 and sequence > $4
 order by sequence
 limit $5;
