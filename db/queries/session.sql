-- name: open_session
-- The newest session of an executor replaces the one before; a drain that was asked for is remembered. No row: the
-- executor is somebody else's than $9, the caller's name. $10: it was dialled. $11: the kinds that the caller may offer.
-- $12: seconds after which it is not connected any more.
-- Who was dialled may be replaced by a dialled one alone. Whoever has a name replaces one without, which came before
-- names were asked for, when that is gone and offered nothing beyond the caller's kinds: its leases go along.
insert into rara.executor as x (executor_id, executor_name, executor_kind, sdk, capabilities, labels, session_id,
                                scheduler_id, draining, token_name, direct)
values ($1::uuid, $2, $3, $4, $5::text::jsonb, $6::text::jsonb, $7::uuid, $8::uuid, false, $9, $10)
    on conflict (executor_id) do update
   set executor_name = excluded.executor_name, executor_kind = excluded.executor_kind, sdk = excluded.sdk,
       capabilities = excluded.capabilities, labels = excluded.labels, session_id = excluded.session_id,
       scheduler_id = excluded.scheduler_id, last_seen_at = now(), connected_at = now(), ended_at = null,
       token_name = coalesce(excluded.token_name, x.token_name), direct = excluded.direct
 where x.token_name = excluded.token_name
    or (excluded.token_name is null and (x.token_name is null or not excluded.direct))
    or (x.token_name is null and not x.direct
        and (x.ended_at is not null or x.last_seen_at < now() - make_interval(secs => $12::float8))
        and not exists (select from jsonb_array_elements(x.capabilities) c(one)
                         where not exists (select from unnest($11::text[]) p(kinds)
                                            where p.kinds in ('*', c.one ->> 'kind')
                                               or (p.kinds like '%.*'
                                                   and starts_with(c.one ->> 'kind', left(p.kinds, -1))))))
returning draining, extract(epoch from drain_by)::float8 as drain_by,
          extract(epoch from drain_by - now())::float8 as drain_within_s;

-- name: close_session
-- Only the newest session ends the row. $3: the executor said goodbye; it takes nothing more, as if it drained.
update rara.executor
   set ended_at = now(), in_flight = 0, free_credit = 0, draining = draining or $3::bool
 where executor_id = $1::uuid and session_id = $2::uuid and ended_at is null;

-- name: lives_elsewhere
-- $3: seconds.
select true
  from rara.executor
 where executor_id = $1::uuid and scheduler_id <> $2::uuid and ended_at is null
   and last_seen_at > now() - make_interval(secs => $3::float8);

-- name: withdraw_capabilities
-- What the session $2 of executor $1 refused (kind $3, version $4) it offers no more, until its next session.
update rara.executor x
   set capabilities = (
       select coalesce(jsonb_agg(jsonb_set(c.one, '{versions}', v.kept) order by c.n), '[]')
         from jsonb_array_elements(x.capabilities) with ordinality c(one, n)
        cross join lateral (
              select jsonb_agg(has.version order by has.n) as kept
                from jsonb_array_elements_text(c.one -> 'versions') with ordinality has(version, n)
               where (c.one ->> 'kind', has.version) not in (
                     select kind, version from unnest($3::text[], $4::text[]) refused(kind, version))
              ) v
        where v.kept is not null)
 where x.executor_id = $1::uuid and x.session_id = $2::uuid;

-- name: drain_executor
-- $2: seconds that its jobs may still take; null: as it was.
update rara.executor
   set draining = true, drain_by = coalesce(now() + make_interval(secs => $2::float8), drain_by)
 where executor_id = $1::uuid
returning draining, extract(epoch from drain_by)::float8 as drain_by,
          extract(epoch from drain_by - now())::float8 as drain_within_s;

-- name: leases_of_executor
-- All that is leased to one executor: its inventory as the database knows it.
select l.step_run_id::text, l.workflow_run_id::text, l.lease_token, l.attempt, l.accepted_at is not null as accepted,
       l.last_sequence, l.gaps, l.granted_on, l.cancel_reason, t.kind,
       extract(epoch from l.cancel_grace)::float8 as cancel_grace_s
  from rara.lease l
  join rara.route t on t.route_id = l.route_id
 where l.executor_id = $1::uuid;

-- name: closed_tokens
-- Tokens $2 of the steps $1 whose attempt the executor itself has ended: what is stored of each. An attempt that was
-- taken from it is not among them: it has to stop.
with closed as (
    select t.lease_token, x.last_sequence, x.granted_on, x.step_run_id, x.attempt
      from unnest($1::uuid[], $2::bigint[]) t(step_run_id, lease_token)
      join rara.result x on x.step_run_id = t.step_run_id and x.lease_token = t.lease_token
    union all
    select t.lease_token, a.last_sequence, a.granted_on, a.step_run_id, a.attempt
      from unnest($1::uuid[], $2::bigint[]) t(step_run_id, lease_token)
      join rara.step_attempt a on a.step_run_id = t.step_run_id and a.lease_token = t.lease_token
)
select c.lease_token, c.last_sequence
  from closed c
 where exists (select from rara.step_event e
                where e.granted_on = c.granted_on and e.step_run_id = c.step_run_id and e.attempt = c.attempt
                  and e.type in ('succeeded', 'failed', 'cancelled'));

-- name: stored_sequences
-- Every stored number of one attempt, to find what never came.
select sequence from rara.step_event
 where granted_on = $1::date and step_run_id = $2::uuid and attempt = $3::int
 order by sequence;

-- name: undelivered_cancels
-- Cancels for the executors $1 that their sessions have not confirmed having received.
select l.executor_id::text, l.lease_token, l.cancel_reason, extract(epoch from l.cancel_grace)::float8 as cancel_grace_s
  from rara.lease l
 where l.executor_id = any($1::uuid[]) and l.cancel_requested_at is not null and l.cancel_delivered_at is null;
