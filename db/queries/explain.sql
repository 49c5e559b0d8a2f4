-- Why a step does not run or end.

-- name: explain_step
-- Where the step $1 stands, with the instants at which what is in its way goes away. $2: accept timeout, seconds.
select st.state, st.reason, st.attempt, st.route_id, st.released_at, st.available_at, st.available_at > now() as backs_off,
       st.accepted_at is not null as is_accepted, st.granted_at + make_interval(secs => $2::float8) as accept_until,
       st.lease_expires_at, st.lease_expires_at < now() as is_expired, st.cancel_reason, st.cancel_requested_at,
       st.cancel_delivered_at, st.cancel_requested_at + l.cancel_grace as cancel_until,
       extract(epoch from now() - coalesce(st.progress_at, st.started_at))::float8 as still_s,
       coalesce(st.progress_at, st.started_at) + l.progress_timeout as progress_until,
       extract(epoch from l.progress_timeout)::float8 as progress_timeout_s,
       st.executor_id::text, e.executor_name,
       q.executor_kind, q.kind, q.kind_version, q.required_labels::text as required_labels
  from rara.step_state st
  join rara.route q on q.route_id = st.route_id
  left join rara.lease l on l.step_run_id = st.step_run_id
  left join rara.executor e on e.executor_id = st.executor_id
 where st.step_run_id = $1::uuid;

-- name: explain_upstream
-- Up to $2 steps that the step $1 waits for.
select d.depends_on_step_run_id::text as step_run_id
  from rara.step_dependency d
  left join rara.result x on x.step_run_id = d.depends_on_step_run_id
 where d.step_run_id = $1::uuid and x.state is distinct from 'succeeded'
 order by d.depends_on_step_run_id
 limit $2;

-- name: explain_ahead
-- Steps before the step $1 in its queue, counted up to $2.
select count(*)::int
  from (select
          from rara.ready me
          join rara.ready other
            on other.route_id = me.route_id
           and (other.available_at, other.step_run_id) < (me.available_at, me.step_run_id)
         where me.step_run_id = $1::uuid
         limit $2) as o;

-- name: explain_executors
-- Up to $2 executors that are connected, those with free credit first. $1: seconds after which one is silent.
select x.executor_id::text, x.executor_name, x.executor_kind, x.sdk, x.capabilities::text as capabilities,
       x.labels::text as labels,
       case when x.last_seen_at < now() - make_interval(secs => $1::float8) then 'silent'
            when x.draining then 'draining'
            else 'connected'
       end as state,
       x.direct, x.in_flight, x.free_credit, x.connected_at, x.last_seen_at
  from rara.executor x
 where x.ended_at is null
 order by x.free_credit desc, x.executor_id
 limit $2;
