-- Which runs and steps a filter means. Each statement looks at a window of rows in the order of an index, however many
-- there are, and gives up to so many that fit, how many of the window do, and where the window ended (fits is false).

-- name: unsuccessful_runs
-- Closed runs without success that were never retried. Behind ($1 ended_at, $2 id) and not later than $3, $4 of them
-- at a time, $5 given. Those that fit but for their state are counted, too. Filters, each null for any: $6 definition,
-- $7 version, $8 states, $9 codes (the reason of the step that failed, the code of its last error, or the reason of the
-- cancel), $10 kind of the step that failed, $11 labels, ($12, $13) created, $14 ended before.
with walked as materialized (
    (select w.*
       from rara.workflow_run w
      where $6::text is null
        and w.ended_at is not null and (w.failed_step_run_id is not null or w.cancel_reason is not null)
        and (w.ended_at, w.workflow_run_id) > ($1::timestamptz, $2::uuid) and w.ended_at <= $3::timestamptz
      order by w.ended_at, w.workflow_run_id
      limit $4::int)
    union all
    (select w.*
       from rara.workflow_run w
      where $6::text is not null and w.definition = $6
        and w.ended_at is not null and (w.failed_step_run_id is not null or w.cancel_reason is not null)
        and (w.ended_at, w.workflow_run_id) > ($1::timestamptz, $2::uuid) and w.ended_at <= $3::timestamptz
      order by w.ended_at, w.workflow_run_id
      limit $4::int)
), fit as materialized (
    select w.workflow_run_id as id, w.ended_at as at, w.state, $8::text[] is null or w.state = any ($8) as is_wanted
      from walked w
      left join lateral (
           select x.reason, x.error, q.kind
             from rara.result x
             join rara.step_run s on s.step_run_id = x.step_run_id
             join rara.route q on q.route_id = s.route_id
            where x.step_run_id = w.failed_step_run_id
           offset 0
           ) f on true
     where w.state in ('failed', 'cancelled')
       and ($7::int is null or w.definition_version = $7)
       and ($9::text[] is null or coalesce(f.reason, w.cancel_reason) = any ($9) or f.error ->> 'code' = any ($9))
       and ($10::text is null or f.kind = $10)
       and ($11::jsonb is null or w.labels @> $11)
       and ($12::timestamptz is null or w.created_at >= $12)
       and ($13::timestamptz is null or w.created_at < $13)
       and ($14::timestamptz is null or w.ended_at < $14)
       and not exists (select from rara.workflow_run r where r.retry_of_workflow_run_id = w.workflow_run_id)
)
select g.id::text, g.at, g.fits, c.total, c.failed, c.cancelled, (select count(*) from walked)::int as walked
  from (select (count(*) filter (where is_wanted))::int as total,
               (count(*) filter (where state = 'failed'))::int as failed,
               (count(*) filter (where state = 'cancelled'))::int as cancelled
          from fit) c,
       ((select id, at, true as fits from fit where is_wanted order by at, id limit $5::int)
        union all
        (select workflow_run_id, ended_at, false from walked order by ended_at desc, workflow_run_id desc limit 1)) g
 order by g.fits desc, g.at, g.id;

-- name: open_runs
-- Runs that have not ended, and whose cancel nobody has asked for. Behind ($1 created_at, $2 id) and not later than $3,
-- $4 of them at a time, $5 given. Filters, each null for any: $6 definition, $7 version, $8 states, $9 labels,
-- $10 created before.
with walked as materialized (
    select w.*
      from rara.workflow_run w
     where w.ended_at is null
       and (w.created_at, w.workflow_run_id) > ($1::timestamptz, $2::uuid) and w.created_at <= $3::timestamptz
     order by w.created_at, w.workflow_run_id
     limit $4::int
), fit as materialized (
    select w.workflow_run_id as id, w.created_at as at
      from walked w
     where w.cancel_requested_at is null
       and ($6::text is null or w.definition = $6)
       and ($7::int is null or w.definition_version = $7)
       and ($8::text[] is null or w.state = any ($8))
       and ($9::jsonb is null or w.labels @> $9)
       and ($10::timestamptz is null or w.created_at < $10)
)
select g.id::text, g.at, g.fits, (select count(*) from fit)::int as total, (select count(*) from walked)::int as walked
  from ((select id, at, true as fits from fit order by at, id limit $5::int)
        union all
        (select workflow_run_id, created_at, false from walked
          order by created_at desc, workflow_run_id desc limit 1)) g
 order by g.fits desc, g.at, g.id;

-- name: backing_off_steps
-- Steps that wait for their next attempt, whose last one ended at $2 at the latest. Behind $1 step, $3 of them at a
-- time, $4 given. Filters, each null for any: $5 definition, $6 version, $7 kind, $8 reasons, $9 labels.
with walked as materialized (
    select v.*
      from rara.waiting v
     where v.step_run_id > $1::uuid
     order by v.step_run_id
     limit $3::int
), fit as materialized (
    select v.step_run_id as id
      from walked v
     cross join lateral (
           select n.definition, n.definition_version, n.labels, n.cancel_requested_at
             from rara.workflow_run n
            where n.workflow_run_id = v.workflow_run_id
           offset 0
           ) n
      join rara.route q on q.route_id = v.route_id
     where v.available_at > now() and n.cancel_requested_at is null
       and ($5::text is null or n.definition = $5)
       and ($6::int is null or n.definition_version = $6)
       and ($7::text is null or q.kind = $7)
       and ($8::text[] is null or v.reason = any ($8))
       and ($9::jsonb is null or n.labels @> $9)
       and exists (select from rara.step_attempt a
                    where a.step_run_id = v.step_run_id and a.attempt = v.attempt and a.ended_at <= $2::timestamptz)
)
select g.id::text, null::timestamptz as at, g.fits, (select count(*) from fit)::int as total,
       (select count(*) from walked)::int as walked
  from ((select id, true as fits from fit order by id limit $4::int)
        union all
        (select step_run_id, false from walked order by step_run_id desc limit 1)) g
 order by g.fits desc, g.id;

-- name: runs_of_steps
select step_run_id::text, workflow_run_id::text from rara.waiting where step_run_id = any ($1::uuid[]);

-- name: end_waits
-- The waiting steps $1 are due now. Under their runs' locks; promote_steps follows.
update rara.waiting set available_at = now() where step_run_id = any ($1::uuid[]) and available_at > now();

-- name: instant
select now() as now;
