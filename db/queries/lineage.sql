-- name: lineage_moment
-- What a walk sees, for its later pages. Bounds its statements: $1 milliseconds and one process each.
select pg_current_snapshot()::text as snapshot, pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next_xid,
       set_config('statement_timeout', $1::int::text, true),
       set_config('max_parallel_workers_per_gather', '0', true);

-- name: lineage_at_digests
-- Edges of the digests $1, which are in order: $2 true for the steps that made them, false for those that used them.
-- ($3, $4, $5) behind which digest, step and name, or null; $6 how many. Only what the snapshot $7 saw, null: all;
-- $8 the next transaction id of now, which tells the epoch of a row's xmin.
-- The limits stand inside, so that a digest with thousands of users is not read and sorted for one page.
select f.sha256, f.step_run_id::text, f.name, f.derived_from
  from (select l.*
          from unnest($1::text[]) as d (sha256)
         cross join lateral (
               select e.sha256, e.step_run_id, e.name, e.derived_from
                 from rara.lineage e
                where e.sha256 = d.sha256
                  and e.produced = $2
                  and ($3::text is null or d.sha256 > $3 or (e.step_run_id, e.name collate "C") > ($4::uuid, $5::text))
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
select f.sha256, f.step_run_id::text, f.name, f.derived_from
  from (select l.*
          from unnest($1::uuid[]) as s (step_run_id)
         cross join lateral (
               select e.sha256, e.step_run_id, e.name, e.derived_from
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

-- name: read_lineage_edges
-- The edges ($1 digest, $2 step, $3 produced, $4 name), in that order, with what people want to know of each.
-- Each is looked up by its key: together they would be joined by scans of whole tables.
select l.*
  from unnest($1::text[], $2::uuid[], $3::bool[], $4::text[]) with ordinality
       as i (sha256, step_run_id, produced, name, place)
 cross join lateral (
       select e.sha256, e.size_bytes, e.name, e.workflow_run_id::text, e.step_run_id::text, e.attempt, e.produced,
              e.declared, e.derived_from, s.step_name, w.definition, w.definition_version, q.kind, i.place,
              coalesce(
                  case when e.produced
                       then (select a.type from rara.artifact a
                              where a.step_run_id = e.step_run_id and a.attempt = e.attempt and a.name = e.name)
                  end,
                  (select a.type from rara.run_artifact a
                    where a.workflow_run_id = e.workflow_run_id and a.sha256 = e.sha256 limit 1),
                  (select a.type from rara.artifact a where a.sha256 = e.sha256 limit 1),
                  '') as artifact_type
         from rara.lineage e
         join rara.step_run s on s.step_run_id = e.step_run_id
         join rara.workflow_run w on w.workflow_run_id = e.workflow_run_id
         join rara.route q on q.route_id = s.route_id
        where e.sha256 = i.sha256 and e.produced = i.produced and e.step_run_id = i.step_run_id and e.name = i.name
        limit 1) as l
 order by l.place;

-- name: lineage_digests_beginning
-- The first and the last digest that begin with the hex digits $1: the same, if there is one.
(select l.sha256, l.size_bytes from rara.lineage l
  where l.sha256 >= $1 and l.sha256 < $1 || 'g' order by l.sha256 limit 1)
union all
(select l.sha256, l.size_bytes from rara.lineage l
  where l.sha256 >= $1 and l.sha256 < $1 || 'g' order by l.sha256 desc limit 1);
