-- The history checker: what may never be, one query for each rule of store/check.py. All of one check look at one
-- read-only snapshot. Each gives up to $1 violations (workflow_run_id, step_run_id, facts) and their total.
-- History of a run that is kept is whole; that of a removed run may lie about for some days, and is joined away.

-- ---------------------------------------------------------------- one owner finishes

-- name: check_step_in_two_places
with place as (
    select step_run_id, workflow_run_id, 'lease' as place from rara.lease
    union all
    select step_run_id, workflow_run_id, 'ready' from rara.ready
    union all
    select step_run_id, workflow_run_id, 'waiting' from rara.waiting
)
select min(workflow_run_id::text) as workflow_run_id, step_run_id::text,
       jsonb_build_object('places', array_agg(place order by place))::text as facts, count(*) over () as total
  from place
 group by step_run_id
having count(*) > 1
 limit $1::int;

-- name: check_step_nowhere
-- Open, in an open run, its dependencies succeeded, and nobody will ever lease it.
select s.workflow_run_id::text, s.step_run_id::text, jsonb_build_object('step_name', s.step_name)::text as facts,
       count(*) over () as total
  from rara.step_run s
  join rara.workflow_run w on w.workflow_run_id = s.workflow_run_id and w.ended_at is null
 where not exists (select from rara.result x where x.step_run_id = s.step_run_id)
   and not exists (select from rara.lease l where l.step_run_id = s.step_run_id)
   and not exists (select from rara.ready r where r.step_run_id = s.step_run_id)
   and not exists (select from rara.waiting t where t.step_run_id = s.step_run_id)
   and not exists (
           select
             from rara.step_dependency d
             left join rara.result x on x.step_run_id = d.depends_on_step_run_id
            where d.step_run_id = s.step_run_id and x.state is distinct from 'succeeded')
 limit $1::int;

-- name: check_step_blocked_for_ever
-- Behind a step that ended without success, or in a run that is to be cancelled: it had to close with that.
select s.workflow_run_id::text, s.step_run_id::text,
       jsonb_build_object('step_name', s.step_name, 'cancel_reason', w.cancel_reason)::text as facts,
       count(*) over () as total
  from rara.step_run s
  join rara.workflow_run w on w.workflow_run_id = s.workflow_run_id and w.ended_at is null
 where not exists (select from rara.result x where x.step_run_id = s.step_run_id)
   and not exists (select from rara.lease l where l.step_run_id = s.step_run_id)
   and not exists (select from rara.ready r where r.step_run_id = s.step_run_id)
   and not exists (select from rara.waiting t where t.step_run_id = s.step_run_id)
   and exists (
           select
             from rara.step_dependency d
             left join rara.result x on x.step_run_id = d.depends_on_step_run_id
            where d.step_run_id = s.step_run_id
              and (x.state <> 'succeeded' or (x.state is null and w.cancel_requested_at is not null)))
 limit $1::int;

-- name: check_row_of_unknown_step
-- A place or a result of a step that is not there, or under another run or route than the step's.
with place as (
    select step_run_id, workflow_run_id, route_id, 'lease' as place from rara.lease
    union all
    select r.step_run_id, r.workflow_run_id,
           -- one that stands aside is known by its pause
           case when exists (select from rara.pause p where p.pause_id = -r.route_id)
                then (select s.route_id from rara.step_run s where s.step_run_id = r.step_run_id)
                else r.route_id
           end, 'ready'
      from rara.ready r
    union all
    select step_run_id, workflow_run_id, route_id, 'waiting' from rara.waiting
    union all
    select step_run_id, workflow_run_id, null, 'result' from rara.result
)
select p.workflow_run_id::text, p.step_run_id::text, jsonb_build_object('place', p.place)::text as facts,
       count(*) over () as total
  from place p
  left join rara.step_run s on s.step_run_id = p.step_run_id
 where s.step_run_id is null or s.workflow_run_id <> p.workflow_run_id or s.route_id <> p.route_id
 limit $1::int;

-- name: check_token_granted_twice
with granted as (
    select step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select step_run_id, attempt, lease_token from rara.result where lease_token is not null
    union all
    select step_run_id, attempt, lease_token from rara.lease
)
select (select s.workflow_run_id::text from rara.step_run s where s.step_run_id = min(g.step_run_id::text)::uuid
       ) as workflow_run_id,
       min(g.step_run_id::text) as step_run_id,
       jsonb_build_object('lease_token', g.lease_token, 'grants',
                          jsonb_agg(jsonb_build_array(g.step_run_id, g.attempt)))::text as facts,
       count(*) over () as total
  from granted g
 group by g.lease_token
having count(*) > 1
 limit $1::int;

-- name: check_token_went_back
with granted as (
    select step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select step_run_id, attempt, lease_token from rara.result where lease_token is not null
    union all
    select step_run_id, attempt, lease_token from rara.lease
), ordered as (
    select step_run_id, attempt, lease_token,
           lag(lease_token) over (partition by step_run_id order by attempt, lease_token) as previous_token
      from granted
)
select s.workflow_run_id::text, o.step_run_id::text,
       jsonb_build_object('attempt', o.attempt, 'lease_token', o.lease_token, 'previous_token', o.previous_token
                         )::text as facts,
       count(*) over () as total
  from ordered o
  join rara.step_run s on s.step_run_id = o.step_run_id
 where o.lease_token < o.previous_token
 limit $1::int;

-- name: check_token_beyond_sequence
-- The next grant could repeat it.
with granted as (
    select step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select step_run_id, attempt, lease_token from rara.result where lease_token is not null
    union all
    select step_run_id, attempt, lease_token from rara.lease
)
select s.workflow_run_id::text, g.step_run_id::text,
       jsonb_build_object('attempt', g.attempt, 'lease_token', g.lease_token, 'next_token', q.next_token)::text as facts,
       count(*) over () as total
  from granted g
  join (select last_value + is_called::int as next_token from rara.lease_token_seq) q on g.lease_token >= q.next_token
  join rara.step_run s on s.step_run_id = g.step_run_id
 limit $1::int;

-- name: check_two_commits
-- An attempt that ended and left its step open, though the step's result, lease or wait says that it did not.
with standing as (
    select step_run_id, workflow_run_id, attempt - (lease_token is not null)::int as ended, 'result' as place
      from rara.result
    union all
    select step_run_id, workflow_run_id, attempt - 1, 'lease' from rara.lease
    union all
    select step_run_id, workflow_run_id, attempt, 'ready' from rara.ready
    union all
    select step_run_id, workflow_run_id, attempt, 'waiting' from rara.waiting
), twice as (
    select p.workflow_run_id, p.step_run_id, a.attempt, p.place
      from standing p
      join rara.step_attempt a on a.step_run_id = p.step_run_id and a.attempt > p.ended
    union all
    select null, step_run_id, attempt, 'attempts'
      from rara.step_attempt
     group by step_run_id, attempt
    having count(*) > 1
    union all
    select null, step_run_id, max(attempt), 'results'
      from rara.result
     group by step_run_id
    having count(*) > 1
)
select coalesce(t.workflow_run_id, s.workflow_run_id)::text as workflow_run_id, t.step_run_id::text,
       jsonb_build_object('attempt', t.attempt, 'and', t.place)::text as facts, count(*) over () as total
  from twice t
  join rara.step_run s on s.step_run_id = t.step_run_id
 limit $1::int;

-- name: check_lease_without_end
select l.workflow_run_id::text, l.step_run_id::text,
       jsonb_build_object('lease_token', l.lease_token, 'executor_id', l.executor_id, 'granted_at', l.granted_at,
                          'expires_at', l.expires_at)::text as facts,
       count(*) over () as total
  from rara.lease l
 where l.expires_at is null or l.expires_at <= l.granted_at or l.expires_at = 'infinity' or l.executor_id is null
    or l.lease_token is null or (l.started_at is not null and l.accepted_at is null)
 limit $1::int;

-- ---------------------------------------------------------------- terminal is final

-- name: check_left_terminal_state
with place as (
    select step_run_id, 'lease' as place from rara.lease
    union all
    select step_run_id, 'ready' from rara.ready
    union all
    select step_run_id, 'waiting' from rara.waiting
)
select x.workflow_run_id::text, x.step_run_id::text,
       jsonb_build_object('state', x.state, 'place', p.place)::text as facts, count(*) over () as total
  from place p
  join rara.result x on x.step_run_id = p.step_run_id
 limit $1::int;

-- name: check_run_changed_after_close
-- A run's last change is the closing of its last step: a later revision is a change, or a second close.
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('state', w.state, 'revision', w.revision, 'newest_result', x.revision)::text as facts,
       count(*) over () as total
  from rara.workflow_run w
  left join (select workflow_run_id, max(revision) as revision from rara.result group by workflow_run_id) x
         on x.workflow_run_id = w.workflow_run_id
 where w.ended_at is not null and w.revision > coalesce(x.revision, 0)
 limit $1::int;

-- name: check_guard_missing
-- The triggers by which the database itself refuses changes are there, and fire; on partitions too.
select null::text as workflow_run_id, null::text as step_run_id,
       jsonb_build_object('table', g.table_name, 'trigger', g.trigger_name)::text as facts, count(*) over () as total
  from (values ('definition', 'definition_is_final'), ('step_run', 'step_run_is_final'),
               ('result', 'result_is_final'), ('workflow_run', 'closed_run_is_final'),
               ('workflow_run', 'run_is_kept'), ('step_event', 'step_event_is_final'),
               ('step_attempt', 'step_attempt_is_final'), ('waiting', 'waiting_is_open')) g(table_name, trigger_name)
 where not exists (select
                     from pg_trigger t
                    where t.tgrelid = to_regclass('rara.' || g.table_name) and t.tgname = g.trigger_name
                      and t.tgenabled in ('O', 'A'))
    or exists (select
                 from pg_trigger t
                 join pg_inherits i on i.inhrelid = t.tgrelid
                where i.inhparent = to_regclass('rara.' || g.table_name) and t.tgname = g.trigger_name
                  and t.tgenabled not in ('O', 'A'))
 limit $1::int;

-- ---------------------------------------------------------------- attempts and the budget

-- name: check_attempt_missing
with standing as (
    select step_run_id, workflow_run_id, attempt - (lease_token is not null)::int as ended from rara.result
    union all
    select step_run_id, workflow_run_id, attempt - 1 from rara.lease
    union all
    select step_run_id, workflow_run_id, attempt from rara.ready
    union all
    select step_run_id, workflow_run_id, attempt from rara.waiting
), stored as (
    select step_run_id, count(distinct attempt) as attempts from rara.step_attempt group by step_run_id
)
select p.workflow_run_id::text, p.step_run_id::text,
       jsonb_build_object('ended', p.ended, 'stored', coalesce(a.attempts, 0))::text as facts,
       count(*) over () as total
  from standing p
  left join stored a on a.step_run_id = p.step_run_id
 where p.ended > coalesce(a.attempts, 0)
 limit $1::int;

-- name: check_failures_miscounted
with standing as (
    select step_run_id, workflow_run_id, failures - spent::int as failures from rara.result
    union all
    select step_run_id, workflow_run_id, failures from rara.lease
    union all
    select step_run_id, workflow_run_id, failures from rara.ready
    union all
    select step_run_id, workflow_run_id, failures from rara.waiting
), stored as (
    select step_run_id, count(*) filter (where spent) as spent from rara.step_attempt group by step_run_id
)
select p.workflow_run_id::text, p.step_run_id::text,
       jsonb_build_object('failures', p.failures, 'spent', coalesce(a.spent, 0))::text as facts,
       count(*) over () as total
  from standing p
  left join stored a on a.step_run_id = p.step_run_id
 where p.failures <> coalesce(a.spent, 0)
 limit $1::int;

-- name: check_budget_misjudged
-- An ending spends the budget, unless its code says that nothing was tried.
select s.workflow_run_id::text, a.step_run_id::text,
       jsonb_build_object('attempt', a.attempt, 'reason', a.reason, 'spent', a.spent)::text as facts,
       count(*) over () as total
  from rara.step_attempt a
  join rara.step_run s on s.step_run_id = a.step_run_id
 where a.spent = (a.reason in ('DISPATCH_LOST', 'EXECUTOR_SHUTDOWN', 'UNSUPPORTED_KIND', 'NO_CAPACITY'))
 limit $1::int;

-- name: check_budget_overrun
-- max_attempts by definition $2, version $3 and step $4: $5. A step whose budget is spent is closed.
with standing as (
    select step_run_id, workflow_run_id, failures, false as is_open from rara.result where failures > 0
    union all
    select step_run_id, workflow_run_id, failures, true from rara.lease where failures > 0
    union all
    select step_run_id, workflow_run_id, failures, true from rara.ready where failures > 0
    union all
    select step_run_id, workflow_run_id, failures, true from rara.waiting where failures > 0
)
select p.workflow_run_id::text, p.step_run_id::text,
       jsonb_build_object('failures', p.failures, 'max_attempts', b.max_attempts, 'is_open', p.is_open)::text as facts,
       count(*) over () as total
  from standing p
  join rara.workflow_run w on w.workflow_run_id = p.workflow_run_id
  join rara.step_run s on s.step_run_id = p.step_run_id
  join unnest($2::text[], $3::int[], $4::text[], $5::int[]) b(definition, version, step_name, max_attempts)
    on b.definition = w.definition and b.version = w.definition_version and b.step_name = s.step_name
 where p.failures > b.max_attempts - p.is_open::int
 limit $1::int;

-- ---------------------------------------------------------------- events are stored in order, once

-- name: check_event_of_unknown_attempt
-- Events of an attempt that was never granted, or not on that day (a resend that missed its first copy). Those of
-- steps that retention has removed wait for the end of their day.
with granted as (
    select granted_on, step_run_id, attempt from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt from rara.lease
)
select s.workflow_run_id::text, e.step_run_id::text,
       jsonb_build_object('granted_on', e.granted_on, 'attempt', e.attempt, 'events', count(*))::text as facts,
       count(*) over () as total
  from rara.step_event e
  join rara.step_run s on s.step_run_id = e.step_run_id
 where not exists (select
                     from granted g
                    where g.granted_on = e.granted_on and g.step_run_id = e.step_run_id and g.attempt = e.attempt)
   and exists (select from rara.step_run s where s.step_run_id = e.step_run_id)
 group by s.workflow_run_id, e.granted_on, e.step_run_id, e.attempt
 limit $1::int;

-- name: check_event_count
-- Numbers that were skipped are counted as gaps, and nothing else is missing.
with granted as (
    select granted_on, step_run_id, attempt, last_sequence, gaps from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt, last_sequence, gaps from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt, last_sequence, gaps from rara.lease
), stored as (
    select granted_on, step_run_id, attempt, count(*) as events, max(sequence) as last_sequence
      from rara.step_event
     group by granted_on, step_run_id, attempt
)
select s.workflow_run_id::text, g.step_run_id::text,
       jsonb_build_object('attempt', g.attempt, 'last_sequence', g.last_sequence, 'gaps', g.gaps,
                          'events', coalesce(e.events, 0), 'newest', coalesce(e.last_sequence, 0))::text as facts,
       count(*) over () as total
  from granted g
  left join stored e on e.granted_on = g.granted_on and e.step_run_id = g.step_run_id and e.attempt = g.attempt
  join rara.step_run s on s.step_run_id = g.step_run_id
 where coalesce(e.events, 0) <> g.last_sequence - g.gaps or coalesce(e.last_sequence, 0) <> g.last_sequence
 limit $1::int;

-- name: check_event_after_terminal
select s.workflow_run_id::text, t.step_run_id::text,
       jsonb_build_object('attempt', t.attempt, 'terminal', t.type, 'terminal_sequence', t.sequence,
                          'type', e.type, 'sequence', e.sequence)::text as facts,
       count(*) over () as total
  from rara.step_event t
  join rara.step_event e on e.granted_on = t.granted_on and e.step_run_id = t.step_run_id and e.attempt = t.attempt
                        and e.sequence > t.sequence and e.type not in ('succeeded', 'failed', 'cancelled')
  join rara.step_run s on s.step_run_id = t.step_run_id
 where t.type in ('succeeded', 'failed', 'cancelled')
 limit $1::int;

-- name: check_two_terminal_events
select (select s.workflow_run_id::text from rara.step_run s where s.step_run_id = e.step_run_id) as workflow_run_id,
       e.step_run_id::text,
       jsonb_build_object('attempt', e.attempt, 'types', array_agg(e.type order by e.sequence))::text as facts,
       count(*) over () as total
  from rara.step_event e
 where e.type in ('succeeded', 'failed', 'cancelled')
 group by e.granted_on, e.step_run_id, e.attempt
having count(*) > 1
 limit $1::int;

-- name: check_outcome_disagrees
-- How an attempt ended, and what its executor's last event said.
with granted as (
    select granted_on, step_run_id, attempt, 'retryable_failed' as outcome from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt, state from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt, 'open' from rara.lease
), said as (
    select granted_on, step_run_id, attempt, min(type) as type
      from rara.step_event
     where type in ('succeeded', 'failed', 'cancelled')
     group by granted_on, step_run_id, attempt
    having count(*) = 1
)
select s.workflow_run_id::text, g.step_run_id::text,
       jsonb_build_object('attempt', g.attempt, 'outcome', g.outcome, 'event', e.type)::text as facts,
       count(*) over () as total
  from granted g
  left join said e on e.granted_on = g.granted_on and e.step_run_id = g.step_run_id and e.attempt = g.attempt
  join rara.step_run s on s.step_run_id = g.step_run_id
 where case when g.outcome = 'succeeded' and e.type is null
            then not exists (select  -- two of them are another rule's
                               from rara.step_event t
                              where t.granted_on = g.granted_on and t.step_run_id = g.step_run_id
                                and t.attempt = g.attempt and t.type = 'succeeded')
            when g.outcome = 'open' then e.type is not null
            else (g.outcome = 'succeeded') <> (e.type = 'succeeded') end
 limit $1::int;

-- name: check_marks_without_events
-- An attempt counts as accepted by its first event, and as started by the first one of work.
with granted as (
    select granted_on, step_run_id, attempt, accepted_at, started_at from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt, accepted_at, started_at from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt, accepted_at, started_at from rara.lease
), stored as (
    select granted_on, step_run_id, attempt,
           bool_or(type not in ('accepted', 'failed', 'cancelled')) as is_work
      from rara.step_event
     group by granted_on, step_run_id, attempt
)
select s.workflow_run_id::text, g.step_run_id::text,
       jsonb_build_object('attempt', g.attempt, 'accepted_at', g.accepted_at, 'started_at', g.started_at,
                          'has_events', e.is_work is not null, 'has_work', coalesce(e.is_work, false))::text as facts,
       count(*) over () as total
  from granted g
  left join stored e on e.granted_on = g.granted_on and e.step_run_id = g.step_run_id and e.attempt = g.attempt
  join rara.step_run s on s.step_run_id = g.step_run_id
 where (g.accepted_at is not null) <> (e.is_work is not null)
    or (g.started_at is not null) <> coalesce(e.is_work, false)
 limit $1::int;

-- ---------------------------------------------------------------- a run closes once, when its last step does

-- name: check_run_counters
with closed as (
    select workflow_run_id,
           count(*) filter (where state = 'succeeded') as succeeded,
           count(*) filter (where state = 'terminal_failed'
                               or (state = 'cancelled' and reason in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR')))
               as failed,
           count(*) filter (where state = 'cancelled' and reason not in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR'))
               as cancelled
      from rara.result
     group by workflow_run_id
), reused as (
    select workflow_run_id, count(*) as steps from rara.reused_step group by workflow_run_id
)
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('counted', jsonb_build_array(w.steps_succeeded, w.steps_failed, w.steps_cancelled),
                          'results', jsonb_build_array(coalesce(c.succeeded, 0), coalesce(c.failed, 0),
                                                       coalesce(c.cancelled, 0)),
                          'reused', coalesce(u.steps, 0))::text as facts,
       count(*) over () as total
  from rara.workflow_run w
  left join closed c on c.workflow_run_id = w.workflow_run_id
  left join reused u on u.workflow_run_id = w.workflow_run_id
 where w.steps_succeeded <> coalesce(c.succeeded, 0) + coalesce(u.steps, 0)
    or w.steps_failed <> coalesce(c.failed, 0)
    or w.steps_cancelled <> coalesce(c.cancelled, 0)
 limit $1::int;

-- name: check_run_total
with own as (
    select workflow_run_id, count(*) as steps from rara.step_run group by workflow_run_id
), reused as (
    select workflow_run_id, count(*) as steps from rara.reused_step group by workflow_run_id
)
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('steps_total', w.steps_total, 'steps', coalesce(o.steps, 0),
                          'reused', coalesce(u.steps, 0))::text as facts,
       count(*) over () as total
  from rara.workflow_run w
  left join own o on o.workflow_run_id = w.workflow_run_id
  left join reused u on u.workflow_run_id = w.workflow_run_id
 where w.steps_total <> coalesce(o.steps, 0) + coalesce(u.steps, 0)
 limit $1::int;

-- name: check_run_closed_early
select s.workflow_run_id::text, s.step_run_id::text,
       jsonb_build_object('run_state', w.state, 'step_name', s.step_name, 'is_leased', l.step_run_id is not null
                         )::text as facts,
       count(*) over () as total
  from rara.step_run s
  join rara.workflow_run w on w.workflow_run_id = s.workflow_run_id and w.ended_at is not null
  left join rara.lease l on l.step_run_id = s.step_run_id
 where not exists (select from rara.result x where x.step_run_id = s.step_run_id)
 limit $1::int;

-- name: check_run_closed_late
select w.workflow_run_id::text, null::text as step_run_id, jsonb_build_object('state', w.state)::text as facts,
       count(*) over () as total
  from rara.workflow_run w
 where w.ended_at is null
   and not exists (select
                     from rara.step_run s
                     left join rara.result x on x.step_run_id = s.step_run_id
                    where s.workflow_run_id = w.workflow_run_id and x.step_run_id is null)
 limit $1::int;

-- name: check_run_wrong_end
-- Closed, and not in the state that its steps give.
with closed as (
    select workflow_run_id,
           bool_or(state = 'terminal_failed'
                   or (state = 'cancelled' and reason in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR'))) as has_failed,
           bool_or(state = 'cancelled') as has_cancelled
      from rara.result
     group by workflow_run_id
)
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('state', w.state, 'has_failed', c.has_failed, 'has_cancelled', c.has_cancelled,
                          'ended_at', w.ended_at)::text as facts,
       count(*) over () as total
  from rara.workflow_run w
  join closed c on c.workflow_run_id = w.workflow_run_id
 where (w.state in ('succeeded', 'failed', 'cancelled')) <> (w.ended_at is not null)
    or (w.ended_at is not null
        and w.state <> case when c.has_failed then 'failed' when c.has_cancelled then 'cancelled' else 'succeeded' end)
 limit $1::int;

-- name: check_failed_step_wrong
-- A failed run names a step of its own that failed it.
select w.workflow_run_id::text, w.failed_step_run_id::text as step_run_id,
       jsonb_build_object('state', x.state, 'reason', x.reason)::text as facts, count(*) over () as total
  from rara.workflow_run w
  left join rara.result x on x.step_run_id = w.failed_step_run_id and x.workflow_run_id = w.workflow_run_id
 where (w.state = 'failed' or w.failed_step_run_id is not null)
   and (x.state = 'terminal_failed'
        or (x.state = 'cancelled' and x.reason in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR'))) is not true
 limit $1::int;

-- name: check_run_state_behind
-- Open, and not in the state that its steps give: `pending` until a lease was accepted, then `running`.
with accepted as (
    select s.workflow_run_id
      from rara.step_attempt a
      join rara.step_run s on s.step_run_id = a.step_run_id
     where a.accepted_at is not null
    union
    select workflow_run_id from rara.result where accepted_at is not null
    union
    select workflow_run_id from rara.lease where accepted_at is not null
)
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('state', w.state, 'started_at', w.started_at, 'accepted', a.workflow_run_id is not null
                         )::text as facts,
       count(*) over () as total
  from rara.workflow_run w
  left join accepted a on a.workflow_run_id = w.workflow_run_id
 where w.ended_at is null
   and case w.state when 'pending' then a.workflow_run_id is not null or w.started_at is not null
                    when 'running' then w.started_at is null
                    else false end
 limit $1::int;

-- name: check_revision_ahead
-- Every change of a step raises its run's revision, so none can be ahead of it.
with stamped as (
    select step_run_id, workflow_run_id, revision from rara.result
    union all
    select step_run_id, workflow_run_id, revision from rara.lease
    union all
    select step_run_id, workflow_run_id, revision from rara.ready
    union all
    select step_run_id, workflow_run_id, revision from rara.waiting
)
select p.workflow_run_id::text, p.step_run_id::text,
       jsonb_build_object('revision', p.revision, 'run_revision', w.revision)::text as facts,
       count(*) over () as total
  from stamped p
  join rara.workflow_run w on w.workflow_run_id = p.workflow_run_id
 where p.revision > w.revision
 limit $1::int;

-- ---------------------------------------------------------------- cancel

-- name: check_wait_after_cancel
-- Waiting for a lease in a run whose end was asked for.
with waits as (
    select step_run_id, workflow_run_id, attempt, 'ready' as place from rara.ready
    union all
    select step_run_id, workflow_run_id, attempt, 'waiting' from rara.waiting
)
select q.workflow_run_id::text, q.step_run_id::text,
       jsonb_build_object('place', q.place, 'attempt', q.attempt, 'cancel_reason', w.cancel_reason)::text as facts,
       count(*) over () as total
  from waits q
  join rara.workflow_run w on w.workflow_run_id = q.workflow_run_id
 where w.cancel_requested_at is not null and w.ended_at is null
 limit $1::int;

-- name: check_lease_not_asked_to_stop
select l.workflow_run_id::text, l.step_run_id::text,
       jsonb_build_object('attempt', l.attempt, 'cancel_reason', w.cancel_reason)::text as facts,
       count(*) over () as total
  from rara.lease l
  join rara.workflow_run w on w.workflow_run_id = l.workflow_run_id
 where w.cancel_requested_at is not null and w.ended_at is null and l.cancel_requested_at is null
 limit $1::int;

-- name: check_run_not_cancelling
select w.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('state', w.state, 'cancel_reason', w.cancel_reason)::text as facts,
       count(*) over () as total
  from rara.workflow_run w
 where w.ended_at is null and (w.cancel_requested_at is not null) <> (w.state = 'cancelling')
 limit $1::int;

-- name: check_granted_after_cancel
-- Ten seconds are more than a request can wait for its locks: a grant within them may have come first.
with granted as (
    select s.workflow_run_id, a.step_run_id, a.attempt, a.granted_at
      from rara.step_attempt a
      join rara.step_run s on s.step_run_id = a.step_run_id
    union all
    select workflow_run_id, step_run_id, attempt, granted_at from rara.result where lease_token is not null
    union all
    select workflow_run_id, step_run_id, attempt, granted_at from rara.lease
)
select g.workflow_run_id::text, g.step_run_id::text,
       jsonb_build_object('attempt', g.attempt, 'granted_at', g.granted_at,
                          'cancel_requested_at', w.cancel_requested_at)::text as facts,
       count(*) over () as total
  from granted g
  join rara.workflow_run w on w.workflow_run_id = g.workflow_run_id
 where g.granted_at > w.cancel_requested_at + interval '10 seconds'
 limit $1::int;

-- name: check_cancelled_without_cause
-- Nobody asked for the run's end, or no step before it ended without success.
select x.workflow_run_id::text, x.step_run_id::text, jsonb_build_object('reason', x.reason)::text as facts,
       count(*) over () as total
  from rara.result x
  join rara.workflow_run w on w.workflow_run_id = x.workflow_run_id
 where x.state = 'cancelled'
   and case when x.reason in ('CANCELLED', 'SIBLING_FAILED') then w.cancel_requested_at is null
            when x.reason = 'UPSTREAM_FAILED'
            then not exists (select
                               from rara.step_dependency d
                               join rara.result u on u.step_run_id = d.depends_on_step_run_id
                              where d.step_run_id = x.step_run_id and u.state <> 'succeeded')
            when x.reason in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR') then false
            else true end
 limit $1::int;

-- ---------------------------------------------------------------- dependencies

-- name: check_released_early
-- Leasable, leased or executed although a step before it had not succeeded by then. Revisions tell the order within
-- a run; a step of an earlier run, taken by reference, had ended before.
with begun as (
    select step_run_id, workflow_run_id, revision, 'result' as place from rara.result where attempt > 0
    union all
    select step_run_id, workflow_run_id, null, 'lease' from rara.lease
    union all
    select step_run_id, workflow_run_id, null, 'ready' from rara.ready
    union all
    select step_run_id, workflow_run_id, null, 'waiting' from rara.waiting
)
select b.workflow_run_id::text, b.step_run_id::text,
       jsonb_build_object('place', b.place, 'depends_on', d.depends_on_step_run_id, 'state', u.state)::text as facts,
       count(*) over () as total
  from begun b
  join rara.step_dependency d on d.step_run_id = b.step_run_id
  left join rara.result u on u.step_run_id = d.depends_on_step_run_id
 where u.state is distinct from 'succeeded'
    or (u.workflow_run_id = b.workflow_run_id and u.revision >= b.revision)
 limit $1::int;

-- name: check_dependency_unknown
-- On a step that is neither of the same run nor taken by reference.
select s.workflow_run_id::text, d.step_run_id::text,
       jsonb_build_object('depends_on', d.depends_on_step_run_id)::text as facts, count(*) over () as total
  from rara.step_dependency d
  left join rara.step_run s on s.step_run_id = d.step_run_id
  left join rara.step_run u on u.step_run_id = d.depends_on_step_run_id
 where s.step_run_id is null or u.step_run_id is null
    or (u.workflow_run_id <> s.workflow_run_id
        and not exists (select
                          from rara.reused_step r
                         where r.workflow_run_id = s.workflow_run_id and r.step_run_id = u.step_run_id))
 limit $1::int;

-- name: check_reused_without_success
select r.workflow_run_id::text, r.step_run_id::text, jsonb_build_object('state', x.state)::text as facts,
       count(*) over () as total
  from rara.reused_step r
  left join rara.result x on x.step_run_id = r.step_run_id
 where x.state is distinct from 'succeeded'
 limit $1::int;

-- name: check_retry_of_open_run
-- A retry follows a run that failed or was cancelled, and at most one retry of a run is open.
select n.workflow_run_id::text, null::text as step_run_id,
       jsonb_build_object('retry_of', n.retry_of_workflow_run_id, 'its_state', o.state)::text as facts,
       count(*) over () as total
  from rara.workflow_run n
  left join rara.workflow_run o on o.workflow_run_id = n.retry_of_workflow_run_id
 where n.retry_of_workflow_run_id is not null
   and (o.state is null or o.state not in ('failed', 'cancelled')
        or (n.ended_at is null
            and exists (select
                          from rara.workflow_run t
                         where t.retry_of_workflow_run_id = n.retry_of_workflow_run_id and t.ended_at is null
                           and t.workflow_run_id <> n.workflow_run_id)))
 limit $1::int;

-- ---------------------------------------------------------------- artifacts and lineage

-- name: check_manifest_without_blob
-- Not inline, and the blob is not stored, is marked as gone, or has another size.
with named as (
    select a.step_run_id, null::uuid as workflow_run_id, a.name, a.sha256, a.size_bytes
      from rara.artifact a
     where a.inline is null
    union all
    select null, r.workflow_run_id, r.name, r.sha256, r.size_bytes
      from rara.run_artifact r
     where r.inline is null
)
select coalesce(n.workflow_run_id, s.workflow_run_id)::text as workflow_run_id, n.step_run_id::text,
       jsonb_build_object('name', n.name, 'sha256', n.sha256, 'size_bytes', n.size_bytes,
                          'stored_bytes', b.size_bytes, 'marked_at', b.marked_at)::text as facts,
       count(*) over () as total
  from named n
  left join rara.blob b on b.sha256 = n.sha256
  left join rara.step_run s on s.step_run_id = n.step_run_id
 where b.sha256 is null or b.marked_at is not null or b.size_bytes <> n.size_bytes
 limit $1::int;

-- name: check_inline_mismatch
with named as (
    select a.step_run_id, null::uuid as workflow_run_id, a.name, a.sha256, a.size_bytes, a.inline
      from rara.artifact a
     where a.inline is not null
    union all
    select null, r.workflow_run_id, r.name, r.sha256, r.size_bytes, r.inline
      from rara.run_artifact r
     where r.inline is not null
)
select coalesce(n.workflow_run_id, s.workflow_run_id)::text as workflow_run_id, n.step_run_id::text,
       jsonb_build_object('name', n.name, 'sha256', n.sha256, 'size_bytes', n.size_bytes,
                          'stored_bytes', length(n.inline))::text as facts,
       count(*) over () as total
  from named n
  left join rara.step_run s on s.step_run_id = n.step_run_id
 where length(n.inline) <> n.size_bytes or encode(sha256(n.inline), 'hex') <> n.sha256
 limit $1::int;

-- name: check_manifest_of_unknown_token
-- A manifest is stored with the end of its attempt.
with ended as (
    select step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select step_run_id, attempt, lease_token from rara.result where lease_token is not null
)
select s.workflow_run_id::text, a.step_run_id::text,
       jsonb_build_object('name', a.name, 'attempt', a.attempt, 'lease_token', a.lease_token)::text as facts,
       count(*) over () as total
  from rara.artifact a
  left join rara.step_run s on s.step_run_id = a.step_run_id
 where not exists (select
                     from ended e
                    where e.step_run_id = a.step_run_id and e.attempt = a.attempt and e.lease_token = a.lease_token)
 limit $1::int;

-- name: check_lineage_without_artifact
-- Lineage of an attempt that did not succeed, of an artifact that is not in its manifest, or of an input that is known
-- nowhere.
select l.workflow_run_id::text, l.step_run_id::text,
       jsonb_build_object('name', l.name, 'sha256', l.sha256, 'attempt', l.attempt, 'produced', l.produced
                         )::text as facts,
       count(*) over () as total
  from rara.lineage l
 where not exists (select
                     from rara.result x
                    where x.step_run_id = l.step_run_id and x.attempt = l.attempt and x.state = 'succeeded'
                      and x.workflow_run_id = l.workflow_run_id)
    or (l.produced
        and not exists (select
                          from rara.artifact a
                         where a.step_run_id = l.step_run_id and a.attempt = l.attempt and a.name = l.name
                           and a.sha256 = l.sha256 and a.size_bytes = l.size_bytes))
    or (not l.produced and l.declared
        and not exists (select from rara.artifact a where a.sha256 = l.sha256)
        and not exists (select
                          from rara.run_artifact r
                         where r.workflow_run_id = l.workflow_run_id and r.sha256 = l.sha256))
 limit $1::int;

-- name: check_manifest_without_lineage
select x.workflow_run_id::text, a.step_run_id::text,
       jsonb_build_object('name', a.name, 'sha256', a.sha256, 'attempt', a.attempt)::text as facts,
       count(*) over () as total
  from rara.artifact a
  join rara.result x on x.step_run_id = a.step_run_id and x.attempt = a.attempt and x.state = 'succeeded'
 where not exists (select
                     from rara.lineage l
                    where l.step_run_id = a.step_run_id and l.attempt = a.attempt and l.produced and l.name = a.name
                      and l.sha256 = a.sha256)
 limit $1::int;

-- ---------------------------------------------------------------- effects and checkpoints

-- name: check_effect_twice
select (select s.workflow_run_id::text from rara.step_run s where s.step_run_id = min(f.step_run_id::text)::uuid
       ) as workflow_run_id,
       min(f.step_run_id::text) as step_run_id,
       jsonb_build_object('idempotency_key', f.idempotency_key, 'name', f.name, 'stored', count(*))::text as facts,
       count(*) over () as total
  from rara.effect f
 group by f.idempotency_key, f.name
having count(*) > 1
 limit $1::int;

-- name: check_effect_of_unknown_token
-- Under a token or a key that the step never had, or without an event.
with granted as (
    select granted_on, step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt, lease_token from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt, lease_token from rara.lease
)
select s.workflow_run_id::text, f.step_run_id::text,
       jsonb_build_object('idempotency_key', f.idempotency_key, 'name', f.name, 'attempt', f.attempt,
                          'lease_token', f.lease_token)::text as facts,
       count(*) over () as total
  from rara.effect f
  join rara.step_run s on s.step_run_id = f.step_run_id
  left join granted g on g.step_run_id = f.step_run_id and g.attempt = f.attempt and g.lease_token = f.lease_token
 where (g.step_run_id is null or s.idempotency_key <> f.idempotency_key
        or not exists (select
                         from rara.step_event e
                        where e.granted_on = g.granted_on and e.step_run_id = f.step_run_id
                          and e.attempt = f.attempt and e.type = 'effect'))
 limit $1::int;

-- name: check_checkpoint_of_unknown_token
-- Under a token or a key that the step never had, or without its event.
with granted as (
    select granted_on, step_run_id, attempt, lease_token from rara.step_attempt
    union all
    select granted_on, step_run_id, attempt, lease_token from rara.result where lease_token is not null
    union all
    select granted_on, step_run_id, attempt, lease_token from rara.lease
)
select s.workflow_run_id::text, c.step_run_id::text,
       jsonb_build_object('idempotency_key', c.idempotency_key, 'attempt', c.attempt, 'lease_token', c.lease_token,
                          'sequence', c.sequence)::text as facts,
       count(*) over () as total
  from rara.checkpoint c
  join rara.step_run s on s.step_run_id = c.step_run_id
  left join granted g on g.step_run_id = c.step_run_id and g.attempt = c.attempt and g.lease_token = c.lease_token
 where (g.step_run_id is null or s.idempotency_key <> c.idempotency_key
        or not exists (select
                         from rara.step_event e
                        where e.granted_on = g.granted_on and e.step_run_id = c.step_run_id
                          and e.attempt = c.attempt and e.sequence = c.sequence))
 limit $1::int;

-- name: check_checkpoint_without_blob
-- The empty blob is kept by its digest alone. Nobody is given the checkpoint of a step that has succeeded.
select s.workflow_run_id::text, c.step_run_id::text,
       jsonb_build_object('idempotency_key', c.idempotency_key, 'name', a.name, 'sha256', a.sha256,
                          'size_bytes', a.size_bytes, 'stored_bytes', b.size_bytes,
                          'marked_at', b.marked_at)::text as facts,
       count(*) over () as total
  from rara.checkpoint_artifact a
  join rara.checkpoint c on c.idempotency_key = a.idempotency_key
  left join rara.step_run s on s.step_run_id = c.step_run_id
  left join rara.blob b on b.sha256 = a.sha256
 where a.size_bytes > 0 and (b.sha256 is null or b.marked_at is not null or b.size_bytes <> a.size_bytes)
   and not exists (select from rara.result x where x.step_run_id = c.step_run_id and x.state = 'succeeded')
 limit $1::int;

-- name: check_checkpoint_of_two_tokens
select s.workflow_run_id::text, c.step_run_id::text,
       jsonb_build_object('idempotency_key', c.idempotency_key, 'name', a.name, 'lease_token', a.lease_token,
                          'sequence', a.sequence, 'checkpoint_lease_token', c.lease_token,
                          'checkpoint_sequence', c.sequence)::text as facts,
       count(*) over () as total
  from rara.checkpoint_artifact a
  join rara.checkpoint c on c.idempotency_key = a.idempotency_key
  left join rara.step_run s on s.step_run_id = c.step_run_id
 where (a.lease_token, a.sequence) <> (c.lease_token, c.sequence)
 limit $1::int;

-- name: check_key_of_two_steps
-- An idempotency key goes from a step to the one that retries it, and to no other.
select min(s.workflow_run_id::text) as workflow_run_id, min(s.step_run_id::text) as step_run_id,
       jsonb_build_object('idempotency_key', s.idempotency_key, 'steps', array_agg(s.step_run_id))::text as facts,
       count(*) over () as total
  from rara.step_run s
 group by s.idempotency_key
having count(*) - count(s.retry_of_step_run_id) > 1
 limit $1::int;

-- ---------------------------------------------------------------- recovery; $2: seconds that are too long

-- name: check_lease_not_reclaimed
select l.workflow_run_id::text, l.step_run_id::text,
       jsonb_build_object('attempt', l.attempt, 'executor_id', l.executor_id, 'expires_at', l.expires_at,
                          'cancel_requested_at', l.cancel_requested_at)::text as facts,
       count(*) over () as total
  from rara.lease l
 where l.expires_at < now() - make_interval(secs => $2::float8)
    or l.cancel_requested_at + l.cancel_grace < now() - make_interval(secs => $2::float8)
 limit $1::int;

-- name: check_wait_not_ended
select w.workflow_run_id::text, w.step_run_id::text,
       jsonb_build_object('attempt', w.attempt, 'available_at', w.available_at)::text as facts,
       count(*) over () as total
  from rara.waiting w
 where w.available_at < now() - make_interval(secs => $2::float8)
 limit $1::int;

-- name: check_deadline_not_kept
with due as (
    select workflow_run_id, null::uuid as step_run_id, deadline
      from rara.workflow_run
     where ended_at is null and cancel_requested_at is null
    union all
    select workflow_run_id, step_run_id, least(deadline, attempt_deadline)
      from rara.lease
     where cancel_requested_at is null
    union all
    select workflow_run_id, step_run_id, deadline from rara.ready
    union all
    select workflow_run_id, step_run_id, deadline from rara.waiting
)
select d.workflow_run_id::text, d.step_run_id::text, jsonb_build_object('deadline', d.deadline)::text as facts,
       count(*) over () as total
  from due d
 where d.deadline < now() - make_interval(secs => $2::float8)
 limit $1::int;

-- ---------------------------------------------------------------- what the checker asks besides

-- name: check_definitions
select definition, version, body from rara.definition;

-- name: check_blobs
-- The next $2 blobs that count, behind the digest $1. The empty blob is kept by its digest alone.
select b.sha256, b.size_bytes
  from rara.blob b
 where b.marked_at is null
   and b.size_bytes > 0
   and b.sha256 > $1::text
 order by b.sha256
 limit $2::int;

-- name: check_blob_user
-- A step or run that names the blob $1; no row: nobody does.
select null::text as workflow_run_id, a.step_run_id::text
  from rara.artifact a
 where a.sha256 = $1 and a.inline is null
 union all
select r.workflow_run_id::text, null
  from rara.run_artifact r
 where r.sha256 = $1 and r.inline is null
 union all
select null, c.step_run_id::text
  from rara.checkpoint_artifact a
  join rara.checkpoint c on c.idempotency_key = a.idempotency_key
 where a.sha256 = $1
 limit 1;

-- name: check_settings
-- For this transaction: the longest that one statement may take, memory for large joins, no compiling.
select set_config('statement_timeout', $1::text, true), set_config('work_mem', '64MB', true),
       set_config('jit', 'off', true);
