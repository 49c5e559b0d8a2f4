-- What the API shows. Lists find ids first; one statement then describes what was found. $limit in comments: payloads
-- and inline bytes above so many bytes are left out, their length stays; null: nothing is left out.

-- name: read_runs
-- The runs $1, in that order, with payloads up to $2 bytes.
select w.workflow_run_id::text, w.definition, w.definition_version, w.state, w.revision, w.labels::text as labels,
       case when length(w.input) <= coalesce($2::int, length(w.input)) then w.input end as input,
       length(w.input) as input_bytes,
       w.steps_total,
       case when w.state = 'succeeded' then jsonb_build_object('succeeded', w.steps_total)::text
            else (select jsonb_object_agg(c.state, c.n)::text -- of each table that tells a state; the rest is pending
                    from (select o.state, sum(o.n) as n
                            from (select r.state, count(*) as n
                                    from rara.result r
                                   where r.workflow_run_id = w.workflow_run_id
                                   group by r.state
                                  union all
                                  select 'succeeded', count(*)
                                    from rara.reused_step u
                                   where u.workflow_run_id = w.workflow_run_id
                                  union all
                                  select case when l.started_at is null then 'leased' else 'running' end, count(*)
                                    from rara.lease l
                                   where l.workflow_run_id = w.workflow_run_id and w.ended_at is null
                                     and w.steps_total > 100
                                   group by 1
                                  union all
                                  select case when l.started_at is null then 'leased' else 'running' end, count(*)
                                    from rara.step_run s -- see watch_run_look
                                   cross join lateral (
                                         select h.started_at
                                           from rara.lease h
                                          where h.step_run_id = s.step_run_id
                                         offset 0) as l
                                   where s.workflow_run_id = w.workflow_run_id and w.ended_at is null
                                     and w.steps_total <= 100
                                   group by 1
                                  union all
                                  select 'retryable_failed', count(*)
                                    from rara.waiting v
                                   where v.workflow_run_id = w.workflow_run_id and w.ended_at is null
                                  union all
                                  select 'retryable_failed', count(*)
                                    from rara.step_run s
                                   cross join lateral ( -- by step, never through all that is ready
                                         select
                                           from rara.ready d
                                          where d.step_run_id = s.step_run_id and d.attempt > 0
                                         offset 0) as again
                                   where s.workflow_run_id = w.workflow_run_id and w.ended_at is null) as o
                           group by o.state
                          having sum(o.n) > 0) as c)
       end as step_counts,
       w.failed_step_run_id::text, x.error::text as error, x.reason as failed_reason,
       w.retry_of_workflow_run_id::text, w.created_at, w.started_at, w.ended_at, w.deadline, w.cancel_requested_at,
       exists (select from rara.run_artifact a where a.workflow_run_id = w.workflow_run_id) as has_artifacts
  from unnest((select $1::uuid[])) with ordinality as i (workflow_run_id, place)
  join rara.workflow_run w on w.workflow_run_id = i.workflow_run_id
  left join rara.result x on x.step_run_id = w.failed_step_run_id
 order by i.place;

-- name: read_run_artifacts
-- The input artifacts of the runs $1, with inline bytes and metadata up to $2 bytes.
select workflow_run_id::text, name, sha256, size_bytes, media_type, type,
       case when $2::int is null then inline end as inline,
       case when length(metadata) <= coalesce($2::int, length(metadata)) then metadata end as metadata,
       length(metadata) as metadata_bytes
  from rara.run_artifact
 where workflow_run_id = any($1::uuid[])
 order by workflow_run_id, name;

-- name: list_runs
-- A page of runs, the newest first. $1 definition, $2 states, $3 labels, $4 created from, $5 created before: each
-- null for any; ($6, $7) behind which run; $8 how many.
select workflow_run_id::text, created_at
  from rara.workflow_run
 where ($1::text is null or definition = $1)
   and ($2::text[] is null or state = any($2))
   and ($3::jsonb is null or labels @> $3)
   and ($4::timestamptz is null or created_at >= $4)
   and ($5::timestamptz is null or created_at < $5)
   and ($6::timestamptz is null or (created_at, workflow_run_id) < ($6, $7::uuid))
 order by created_at desc, workflow_run_id desc
 limit $8;

-- name: run_exists
select exists (select from rara.workflow_run where workflow_run_id = $1::uuid);

-- name: step_exists
select exists (select from rara.step_run where step_run_id = $1::uuid);

-- name: read_steps
-- The steps $1, in that order, with payloads up to $2 bytes. Where $1 is null: up to $4 steps that the run $3 shows,
-- the oldest first. `last_*`: the attempt before, where it tells more.
-- The array is hidden from the planner, which would else plan anew for each length: ten times what the reading takes.
select st.step_run_id::text, st.workflow_run_id::text, st.step_name, w.definition, w.definition_version,
       q.executor_kind, q.kind, q.kind_version, st.state, st.reason, st.attempt, st.failures, st.revision,
       coalesce(st.executor_id, last.executor_id)::text as executor_id, e.executor_name,
       coalesce(nullif(st.last_sequence, 0), last.last_sequence, 0) as last_sequence,
       case when length(st.output) <= coalesce($2::int, length(st.output)) then st.output end as output,
       length(st.output) as output_bytes,
       case when st.state <> 'succeeded' then coalesce(st.error, last.error)::text end as error,
       st.cancel_requested_at, st.cancel_reason, st.cancel_delivered_at, st.cancel_confirmed_at,
       st.available_at, st.lease_expires_at, st.started_at, st.ended_at, least(st.deadline, w.deadline) as deadline,
       p.body as progress, st.granted_on is not null and st.state = 'succeeded' as has_manifest,
       exists (select from rara.artifact a where a.step_run_id = st.step_run_id and a.attempt = st.attempt)
           as has_artifacts,
       case when st.executor_id is null then last.kind_version
            else coalesce((select x.kind_version from rara.result x where x.step_run_id = st.step_run_id),
                          (select l.kind_version from rara.lease l where l.step_run_id = st.step_run_id))
       end as ran_version,
       e.executor_kind as ran_by_kind, e.sdk as ran_by_sdk
  from unnest((select coalesce($1::uuid[],
                               array(select o.step_run_id
                                       from (select s.step_run_id from rara.step_run s where s.workflow_run_id = $3::uuid
                                             union all
                                             select u.step_run_id from rara.reused_step u
                                              where u.workflow_run_id = $3::uuid) as o
                                      order by o.step_run_id
                                      limit $4::int))))
       with ordinality as i (step_run_id, place)
  join rara.step_state st on st.step_run_id = i.step_run_id
  join rara.workflow_run w on w.workflow_run_id = st.workflow_run_id
  join rara.route q on q.route_id = st.route_id
  left join lateral (
       select a.executor_id, a.error, a.granted_on, a.attempt, a.last_sequence, a.kind_version
         from rara.step_attempt a
        where a.step_run_id = st.step_run_id
          and st.attempt > 0 and (st.granted_on is null or (st.attempt > 1 and st.state <> 'succeeded'))
        order by a.attempt desc
        limit 1) as last on true
  left join lateral (
       select v.body
         from rara.step_event v
        where v.granted_on = coalesce(st.granted_on, last.granted_on)
          and v.step_run_id = st.step_run_id
          and v.attempt = case when st.granted_on is null then last.attempt else st.attempt end
          and v.type = 'progress'
        order by v.sequence desc
        limit 1) as p on true
  left join rara.executor e on e.executor_id = coalesce(st.executor_id, last.executor_id)
 order by i.place;

-- name: read_manifests
-- What the attempts ($1 step, $2 attempt) made, with inline bytes and metadata up to $3 bytes.
select a.step_run_id::text, a.attempt, a.name, a.sha256, a.size_bytes, a.media_type, a.type,
       case when $3::int is null then a.inline end as inline,
       case when length(a.metadata) <= coalesce($3::int, length(a.metadata)) then a.metadata end as metadata,
       length(a.metadata) as metadata_bytes,
       coalesce(l.derived_from, '{}') as derived_from
  from unnest($1::uuid[], $2::int[]) as i (step_run_id, attempt)
  join rara.artifact a on a.step_run_id = i.step_run_id and a.attempt = i.attempt
  left join rara.lineage l
    on l.sha256 = a.sha256 and l.step_run_id = a.step_run_id and l.attempt = a.attempt and l.produced
   and l.name = a.name
 order by a.step_run_id, a.attempt, a.position;

-- name: read_blob_sizes
-- What is known of digests, to show a size with each. One edge of each tells: thousands may use the same.
select i.sha256, l.size_bytes
  from unnest($1::text[]) as i (sha256)
 cross join lateral (select e.size_bytes from rara.lineage e where e.sha256 = i.sha256 limit 1) as l;

-- name: read_attempts
-- Every attempt of the step $1, the current one too, in order.
select a.attempt, a.lease_token, a.executor_id::text, e.executor_name, a.reason, a.spent, a.error::text as error,
       a.last_sequence, a.gaps, a.granted_at, a.accepted_at, a.started_at, a.ended_at, a.kind_version as ran_version,
       e.executor_kind as ran_by_kind, e.sdk as ran_by_sdk
  from (select attempt, lease_token, executor_id, reason, spent, error, last_sequence, gaps, granted_at, accepted_at,
               started_at, ended_at, kind_version
          from rara.step_attempt
         where step_run_id = $1::uuid
        union all
        select attempt, lease_token, executor_id, reason, spent, error, last_sequence, gaps, granted_at, accepted_at,
               started_at, ended_at, kind_version
          from rara.result
         where step_run_id = $1::uuid and lease_token is not null
        union all
        select attempt, lease_token, executor_id, '', false, null, last_sequence, gaps, granted_at, accepted_at,
               started_at, null, kind_version
          from rara.lease
         where step_run_id = $1::uuid) as a
  left join rara.executor e on e.executor_id = a.executor_id
 order by a.attempt;

-- name: list_steps_of_run
-- A page of one run's steps ($1), reused ones too, the newest first. $2 states, $3 kind: null for any; $4 below which
-- step; $5 how many.
select st.step_run_id::text
  from (select s.step_run_id from rara.step_run s where s.workflow_run_id = $1::uuid
        union all
        select u.step_run_id from rara.reused_step u where u.workflow_run_id = $1::uuid) as o
  join rara.step_state st on st.step_run_id = o.step_run_id
 where ($2::text[] is null or st.state = any($2))
   and ($3::text is null or st.route_id = any(array(select route_id from rara.route where kind = $3)))
   and ($4::uuid is null or st.step_run_id < $4)
 order by st.step_run_id desc
 limit $5;

-- name: step_ids_of_run
-- Up to $2 steps that the run $1 shows, its own and those that it reuses, the oldest first.
select o.step_run_id::text
  from (select s.step_run_id from rara.step_run s where s.workflow_run_id = $1::uuid
        union all
        select u.step_run_id from rara.reused_step u where u.workflow_run_id = $1::uuid) as o
 order by o.step_run_id
 limit $2;

-- name: list_steps
-- A page of all steps, the newest first. $1 kind or null, $2 below which step, $3 how many.
select s.step_run_id::text
  from rara.step_run s
 where ($1::text is null or s.route_id = any(array(select route_id from rara.route where kind = $1)))
   and ($2::uuid is null or s.step_run_id < $2)
 order by s.step_run_id desc
 limit $3;

-- name: list_steps_in_states
-- The same of the states $4, each looked up where such steps stand, so that a few failures among a million steps are
-- found without asking every step.
with wanted as materialized (
    select array(select route_id from rara.route where $1::text is null or kind = $1) as routes
)
select f.step_run_id::text
  from (
        (select l.step_run_id
           from rara.lease l
          where case when l.started_at is null then 'leased' else 'running' end = any($4::text[])
            and l.route_id = any((select routes from wanted)::int[])
            and ($2::uuid is null or l.step_run_id < $2)
          order by l.step_run_id desc limit $3)
        union all
        (select w.step_run_id
           from rara.waiting w
          where 'retryable_failed' = any($4::text[])
            and w.route_id = any((select routes from wanted)::int[])
            and ($2::uuid is null or w.step_run_id < $2)
          order by w.step_run_id desc limit $3)
        union all
        (select r.step_run_id
           from rara.ready r
          where case when r.attempt > 0 then 'retryable_failed' else 'pending' end = any($4::text[])
            and case when r.route_id > 0 then r.route_id -- else it stands aside: its definition is paused
                     else (select s.route_id from rara.step_run s where s.step_run_id = r.step_run_id)
                end = any((select routes from wanted)::int[])
            and ($2::uuid is null or r.step_run_id < $2)
          order by r.step_run_id desc limit $3)
        union all
        (select s.step_run_id -- behind its dependencies
           from rara.step_run s
          where 'pending' = any($4::text[])
            and s.route_id = any((select routes from wanted)::int[])
            and ($2::uuid is null or s.step_run_id < $2)
            and not exists (select from rara.result x where x.step_run_id = s.step_run_id)
            and not exists (select from rara.lease l where l.step_run_id = s.step_run_id)
            and not exists (select from rara.waiting w where w.step_run_id = s.step_run_id)
            and not exists (select from rara.ready r where r.step_run_id = s.step_run_id)
          order by s.step_run_id desc limit $3)
        union all
        (select x.step_run_id
           from rara.result x
           join rara.step_run s on s.step_run_id = x.step_run_id
          where x.state = any($4::text[])
            and s.route_id = any((select routes from wanted)::int[])
            and ($2::uuid is null or x.step_run_id < $2)
          order by x.step_run_id desc limit $3)
       ) as f
 order by f.step_run_id desc
 limit $3;

-- name: list_executors
-- A page of executors by id, downwards. $1 seconds after which one is silent, $2 states, $3 kind: null for any;
-- $4 below which id; $5 how many; $6 one executor alone, or null.
select x.executor_id::text, x.executor_name, x.executor_kind, x.sdk, x.capabilities::text as capabilities,
       x.labels::text as labels, x.state, x.direct, x.in_flight, x.free_credit, x.connected_at, x.last_seen_at
  from (select e.*,
               case when e.ended_at is not null then 'lost'
                    when e.last_seen_at < now() - make_interval(secs => $1::float8) then 'silent'
                    when e.draining then 'draining'
                    else 'connected'
               end as state
          from rara.executor e) as x
 where ($2::text[] is null or x.state = any($2))
   and ($3::text is null or x.capabilities @> jsonb_build_array(jsonb_build_object('kind', $3)))
   and ($4::uuid is null or x.executor_id < $4)
   and ($6::uuid is null or x.executor_id = $6)
 order by x.executor_id desc
 limit $5;
