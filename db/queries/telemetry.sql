-- What telemetry looks at: rarely, and within bounds that do not grow with what waits.

-- name: queues_by_kind
-- Per kind what is ready, how long its oldest is, and what waits. $1: how many are counted at most, of the ready ones
-- per route; of all together ten times as many, and where that is less than a hundred per route, a hundred. A route's
-- first entries are the oldest, as in grant_leases.
with served as materialized (
    select r.route_id
      from rara.route r
     where exists (select from rara.ready x where x.route_id = r.route_id)
), most as (
    select least($1::int, greatest(100, 10 * $1::bigint / greatest(1, count(*)))) as per_route
      from served
)
select r.kind,
       coalesce(sum(p.ready), 0)::bigint as ready,
       max(extract(epoch from now() - p.oldest))::float8 as oldest_s,
       coalesce(sum(w.waiting), 0)::bigint as waiting
  from rara.route r
  left join lateral (
       select count(*) as ready, min(q.available_at) as oldest
         from (select x.available_at
                 from rara.ready x
                where x.route_id = r.route_id
                order by x.available_at, x.step_run_id
                limit (select per_route from most)) q
       ) p on true
  left join (
       select q.route_id, count(*) as waiting
         from (select x.route_id from rara.waiting x limit $1::int) q
        group by q.route_id
       ) w on w.route_id = r.route_id
 where p.ready > 0 or w.waiting > 0
 group by r.kind;

-- name: oldest_transaction
-- Age in seconds of the oldest open transaction in this database, this one aside. Those of other roles show only to
-- who may see them (pg_read_all_stats).
select coalesce(max(extract(epoch from now() - a.xact_start)), 0)::float8
  from pg_stat_activity a
 where a.datname = current_database() and a.pid <> pg_backend_pid();

-- name: ended_attempts
-- Of attempts ($1 step, $2 lease token, $3 UTC day of the grant, $4 number) those whose run is traced and sampled: the
-- last digit of its traceparent is odd then.
select q.n, w.traceparent, w.tracestate, w.workflow_run_id::text, w.definition, s.step_name, r.kind,
       e.executor_id::text, e.granted_at, e.accepted_at, e.started_at, e.ended_at
  from unnest($1::uuid[], $2::bigint[], $3::date[], $4::int[])
       with ordinality q(step_run_id, lease_token, granted_on, attempt, n)
  join rara.step_run s on s.step_run_id = q.step_run_id
  join rara.workflow_run w on w.workflow_run_id = s.workflow_run_id
  join rara.route r on r.route_id = s.route_id
 cross join lateral (
       select x.executor_id, x.granted_at, x.accepted_at, x.started_at, x.ended_at
         from rara.result x
        where x.step_run_id = q.step_run_id and x.lease_token = q.lease_token
       union all
       select a.executor_id, a.granted_at, a.accepted_at, a.started_at, a.ended_at
         from rara.step_attempt a
        where a.granted_on = q.granted_on and a.step_run_id = q.step_run_id and a.attempt = q.attempt
       ) e
 where w.traceparent ~ '[13579bdf]$'
 order by q.n;
