-- name: lineage_moment
-- What a walk sees, for its later pages. Bounds its statements, $1 milliseconds and one process each, and has them
-- planned for what they are given: a plan for any limit sorts all users of a hot digest.
select pg_current_snapshot()::text as snapshot, pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next_xid,
       set_config('statement_timeout', $1::int::text, true),
       set_config('max_parallel_workers_per_gather', '0', true),
       set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: lineage_at_digests
-- Edges of the digests $1, which are in order: $2 true for the steps that made them, false for those that used them.
-- ($3, $4, $5) behind which digest, step and name, or null; $6 how many. Only what the snapshot $7 saw, null: all;
-- $8 the next transaction id of now, which tells the epoch of a row's xmin.
-- The limits stand inside, so that a digest with thousands of users is not read and sorted for one page. How many
-- digests derived_from has is told by the room that it takes, 68 bytes each and no more than 24 for all: it is stored
-- as it is, uncompressed, and not read for this.
select f.sha256, f.step_run_id::text, f.name, f.origins, f.size_bytes, f.workflow_run_id::text, f.attempt,
       f.declared
  from (select l.*
          from unnest($1::text[]) as d (sha256)
         cross join lateral (
               select e.sha256, e.step_run_id, e.name, pg_column_size(e.derived_from) / 68 as origins,
                      e.size_bytes, e.workflow_run_id, e.attempt, e.declared
                 from rara.lineage e
                where e.sha256 = d.sha256
                  and e.produced = $2
                  -- The index begins where the page does.
                  and e.step_run_id >= case when d.sha256 = $3::text then $4::uuid
                                            else '00000000-0000-0000-0000-000000000000' end
                  and ($3 is null or d.sha256 > $3 or (e.step_run_id, e.name collate "C") > ($4, $5::text))
                  and ($7::text is null
                       or pg_visible_in_snapshot(
                              ($8::bigint - mod($8::bigint - e.xmin::text::bigint, 4294967296))::text::xid8,
                              $7::text::pg_snapshot))
                order by e.step_run_id, e.name collate "C"
                limit $6) as l
         limit $6) as f
 order by f.sha256, f.step_run_id, f.name collate "C";

-- name: lineage_at_steps
-- Edges of the steps $1, which are in order: $2 true for what they made, false for what they used. $3 how many; $4 and
-- $5 as $7 and $8 there.
select f.sha256, f.step_run_id::text, f.name, f.origins, f.size_bytes, f.workflow_run_id::text, f.attempt,
       f.declared
  from (select l.*
          from unnest($1::uuid[]) as s (step_run_id)
         cross join lateral (
               select e.sha256, e.step_run_id, e.name, pg_column_size(e.derived_from) / 68 as origins,
                      e.size_bytes, e.workflow_run_id, e.attempt, e.declared
                 from rara.lineage e
                where e.step_run_id = s.step_run_id
                  and e.produced = $2
                  and ($4::text is null
                       or pg_visible_in_snapshot(
                              ($5::bigint - mod($5::bigint - e.xmin::text::bigint, 4294967296))::text::xid8,
                              $4::text::pg_snapshot))
                order by e.sha256, e.name collate "C"
                limit $3) as l
         limit $3) as f
 order by f.step_run_id, f.sha256, f.name collate "C";

-- name: lineage_origins
-- What outputs ($1 digest, $2 step, $3 attempt, $4 name) were derived from, in that order; nothing where one is gone.
select coalesce(e.derived_from, '{}') as derived_from
  from unnest($1::text[], $2::uuid[], $3::int[], $4::text[]) with ordinality
       as i (sha256, step_run_id, attempt, name, place)
  left join lateral (
       select l.derived_from
         from rara.lineage l
        where l.sha256 = i.sha256 and l.produced and l.step_run_id = i.step_run_id and l.attempt = i.attempt
          and l.name = i.name
        limit 1) as e on true
 order by i.place;

-- name: read_lineage_steps
-- What people call the steps $1. Each is looked up by its key: together they would be joined by scans of whole tables.
select l.*
  from unnest($1::uuid[]) as i (step_run_id)
 cross join lateral (
       select s.step_run_id::text, s.step_name, w.definition, w.definition_version, q.kind
         from rara.step_run s
         join rara.workflow_run w on w.workflow_run_id = s.workflow_run_id
         join rara.route q on q.route_id = s.route_id
        where s.step_run_id = i.step_run_id
        limit 1) as l;

-- name: read_lineage_types
-- The types of artifacts ($1 digest, $2 run, $3 step, $4 attempt, $5 name; $6 made by the step), in that order: as the
-- maker says, else as the run was given it, else as any maker of the same bytes says.
select coalesce(
           case when i.produced
                then (select a.type from rara.artifact a
                       where a.step_run_id = i.step_run_id and a.attempt = i.attempt and a.name = i.name)
           end,
           (select a.type from rara.run_artifact a
             where a.workflow_run_id = i.workflow_run_id and a.sha256 = i.sha256 limit 1),
           (select a.type from rara.artifact a where a.sha256 = i.sha256 limit 1),
           '') as artifact_type
  from unnest($1::text[], $2::uuid[], $3::uuid[], $4::int[], $5::text[], $6::bool[]) with ordinality
       as i (sha256, workflow_run_id, step_run_id, attempt, name, produced, place)
 order by i.place;

-- name: lineage_digests_beginning
-- The first and the last digest that begin with the hex digits $1: the same, if there is one.
(select l.sha256, l.size_bytes from rara.lineage l
  where l.sha256 >= $1 and l.sha256 < $1 || 'g' order by l.sha256 limit 1)
union all
(select l.sha256, l.size_bytes from rara.lineage l
  where l.sha256 >= $1 and l.sha256 < $1 || 'g' order by l.sha256 desc limit 1);
