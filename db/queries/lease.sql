-- name: grant_leases
-- Lease up to $5 ready steps to the executors $6 (one entry per free slot), oldest first.
-- One ordered, limited probe per route ($1): the planner does not merge the streams of an ANY list. $2: most per
-- route. ($3, $4): where the last turn stopped, so that dead entries are not walked again under a long transaction.
-- $8: the version of its kind that these executors run of each route.
-- Rows are removed by their place: by key, a plan for any number of them reads the whole table. Granted is what was
-- removed: a row that somebody rewrote since this statement began is locked in its new place, where nothing is removed.
with candidate as materialized (
    select r.*, q.kind_version
      from unnest($1::int[], $2::int[], $3::timestamptz[], $4::uuid[], $8::text[])
           q(route_id, most, after_at, after_id, kind_version)
     cross join lateral (
           select p.ctid as place, p.*
             from rara.ready p
            where p.route_id = q.route_id
              and (p.available_at, p.step_run_id) > (q.after_at, q.after_id)
              and (p.deadline is null or p.deadline > now())
            order by p.available_at, p.step_run_id
            limit q.most
              for update skip locked
           ) r
     order by r.available_at, r.step_run_id
     limit $5::int
), taken as (
    delete from rara.ready where ctid = any (array(select place from candidate))
    returning step_run_id
), granted as materialized (
    select c.*, nextval('rara.lease_token_seq') as lease_token,
           ($6::uuid[])[(row_number() over (order by c.available_at, c.step_run_id))::int] as executor_id
      from candidate c
     where c.step_run_id = any (array(select step_run_id from taken))
), leased as (
    insert into rara.lease (step_run_id, workflow_run_id, route_id, lease_token, attempt, failures, free_endings,
                            executor_id, released_at, deadline, granted_at, granted_on, expires_at, revision,
                            kind_version)
    select step_run_id, workflow_run_id, route_id, lease_token, attempt + 1, failures, free_endings, executor_id,
           released_at, deadline, now(), (now() at time zone 'UTC')::date, now() + make_interval(secs => $7::float8),
           revision, kind_version
      from granted
)
select g.step_run_id::text, g.workflow_run_id::text, g.route_id, g.lease_token, g.attempt + 1 as attempt, g.failures,
       g.free_endings, g.executor_id::text, (now() at time zone 'UTC')::date as granted_on,
       least(g.deadline, w.deadline) as deadline,
       extract(epoch from least(g.deadline, w.deadline) - now())::float8 as time_remaining_s,
       g.available_at, s.step_name, s.idempotency_key, s.retry_of_step_run_id is not null as carries_over,
       w.definition, w.definition_version, w.input, w.traceparent, w.tracestate,
       extract(epoch from clock_timestamp() - g.available_at)::float8 as waited_s
  from granted g
  join rara.step_run s on s.step_run_id = g.step_run_id
  join rara.workflow_run w on w.workflow_run_id = g.workflow_run_id
 order by g.lease_token;

-- name: upstream_outputs
-- The outputs that templates of the steps $1 refer to.
select d.step_run_id::text, u.step_name, x.output
  from rara.step_dependency d
  join rara.step_run u on u.step_run_id = d.depends_on_step_run_id
  join rara.result x on x.step_run_id = d.depends_on_step_run_id
 where d.step_run_id = any($1::uuid[]) and x.state = 'succeeded';

-- name: upstream_artifacts
-- The artifacts of the steps that the steps $1 depend on.
select d.step_run_id::text, u.step_name, a.name, a.sha256, a.size_bytes, a.media_type, a.type, a.inline, a.metadata
  from rara.step_dependency d
  join rara.step_run u on u.step_run_id = d.depends_on_step_run_id
  join rara.result x on x.step_run_id = d.depends_on_step_run_id and x.state = 'succeeded'
  join rara.artifact a on a.step_run_id = x.step_run_id and a.attempt = x.attempt
 where d.step_run_id = any($1::uuid[]);

-- name: run_artifacts
-- The input artifacts of the runs $1.
select workflow_run_id::text, name, sha256, size_bytes, media_type, type, inline, metadata
  from rara.run_artifact
 where workflow_run_id = any($1::uuid[]);

-- name: carried_checkpoints
select c.idempotency_key, c.data,
       exists (select from rara.checkpoint_artifact a where a.idempotency_key = c.idempotency_key) as has_artifacts
  from rara.checkpoint c
 where c.idempotency_key = any($1::text[]);

-- name: carried_checkpoint_artifacts
select a.idempotency_key, a.name, a.sha256, a.size_bytes, a.media_type, a.type
  from rara.checkpoint_artifact a
 where a.idempotency_key = any($1::text[])
 order by a.idempotency_key, a.position;

-- name: carried_effects
select idempotency_key, name, result from rara.effect where idempotency_key = any($1::text[]) order by recorded_at;

-- name: renew_leases
-- Renew exactly the leases listed (step $1, token $2, executor $3). A row that a committer holds is skipped, not
-- waited for: renewals take many rows and no run, so waiting here could deadlock with a cascade.
-- After a cancel's grace and a heartbeat ($5) a lease is renewed no more.
with held as materialized (
    select l.place, l.lease_token, l.cancel_reason, l.cancel_grace,
           coalesce(now() < l.cancel_requested_at + l.cancel_grace + make_interval(secs => $5::float8), true)
               as goes_on
      from unnest($1::uuid[], $2::bigint[], $3::uuid[]) b(step_run_id, lease_token, executor_id)
     cross join lateral (
           select h.ctid as place, h.lease_token, h.cancel_reason, h.cancel_grace, h.cancel_requested_at
             from rara.lease h
            where h.step_run_id = b.step_run_id and h.lease_token = b.lease_token
              and h.executor_id = b.executor_id
            limit 1
              for update skip locked
           ) l
), renewed as (
    update rara.lease l
       set expires_at = greatest(l.expires_at, now() + make_interval(secs => $4::float8))
     where l.ctid = any (array(select h.place from held h where h.goes_on))
    returning l.lease_token
)
-- A row that was rewritten since this statement began is locked in its new place, where nothing is renewed: it is left
-- out, like one that a committer holds.
select h.lease_token, h.cancel_reason, extract(epoch from h.cancel_grace)::float8 as cancel_grace_s
  from held h
 where not h.goes_on or h.lease_token = any (array(select lease_token from renewed));

-- name: renew_held_lease
-- Renew one lease (step $1, token $2, executor $3) that a committer holds: wait for it, holding nothing else. No row:
-- it is gone, or is to end.
update rara.lease l
   set expires_at = greatest(l.expires_at, now() + make_interval(secs => $4::float8))
 where l.step_run_id = $1::uuid and l.lease_token = $2::bigint and l.executor_id = $3::uuid
   and l.cancel_requested_at is null
returning l.lease_token;

-- name: current_tokens
-- Which of the tokens $2 of the steps $1 are current.
select l.lease_token
  from unnest($1::uuid[], $2::bigint[]) b(step_run_id, lease_token)
 cross join lateral (
       select h.lease_token
         from rara.lease h
        where h.step_run_id = b.step_run_id and h.lease_token = b.lease_token
        limit 1
       ) l;

-- name: seen_executors
-- Note that sessions live. One that is no longer its executor's newest was replaced, on whichever scheduler.
with beat as (
    select executor_id, session_id, in_flight, free_credit
      from unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[]) b(executor_id, session_id, in_flight, free_credit)
), seen as (
    update rara.executor x
       set last_seen_at = now(), in_flight = b.in_flight, free_credit = b.free_credit
      from beat b
     where x.executor_id = b.executor_id and x.session_id = b.session_id
)
select x.executor_id::text, x.draining, x.session_id = b.session_id as is_newest,
       extract(epoch from x.drain_by)::float8 as drain_by,
       extract(epoch from x.drain_by - now())::float8 as drain_within_s
  from beat b
  join rara.executor x on x.executor_id = b.executor_id;
