-- Definitions and the routes of their steps. Both are written once and never changed.

-- name: definition_lock
-- One registration of a name at a time, to the end of the transaction: versions are consecutive.
select pg_advisory_xact_lock(hashtextextended('rara.definition ' || $1, 0));

-- name: definition_by_hash
select version, created_at
  from rara.definition
 where definition = $1 and content_sha256 = $2;

-- name: definition_insert
-- Called under definition_lock.
insert into rara.definition (definition, version, content_sha256, body)
select $1, coalesce(max(d.version), 0) + 1, $2, $3
  from rara.definition d
 where d.definition = $1
returning version, created_at;

-- name: definition_newest
select max(version) as version
  from rara.definition
 where definition = $1;

-- name: definition_get
select definition, version, content_sha256, body, created_at
  from rara.definition
 where definition = $1 and version = $2;

-- name: definition_list_newest
-- The newest version of up to $2 definitions whose names follow $1.
select n.definition, n.version, n.content_sha256, n.body, n.created_at
  from (select distinct definition from rara.definition where definition > $1 order by definition limit $2) as d
 cross join lateral (
       select * from rara.definition x
        where x.definition = d.definition
        order by x.version desc
        limit 1) as n
 order by n.definition;

-- name: definition_list_versions
-- Up to $3 versions of one definition, the newest first; $2: below which version, null from the top.
select definition, version, content_sha256, body, created_at
  from rara.definition
 where definition = $1 and ($2::int is null or version < $2)
 order by version desc
 limit $3;

-- name: route_find
-- The ids of routes, in the order asked; null where there is none yet. Arrays of equal length.
select r.route_id
  from unnest($1::text[], $2::text[], $3::text[], $4::text[])
       with ordinality as w (executor_kind, kind, kind_version, required_labels, place)
  left join rara.route r
    on r.executor_kind = w.executor_kind
   and r.kind = w.kind
   and r.kind_version = w.kind_version
   and r.required_labels = w.required_labels::jsonb
 order by w.place;

-- name: route_lock
-- One writer at a time, to the end of its transaction: ids become visible in their order, so that who has read up
-- to an id misses none below it.
select pg_advisory_xact_lock(hashtextextended('rara.route', 0));

-- name: route_insert
-- Called under route_lock.
insert into rara.route (executor_kind, kind, kind_version, required_labels)
select w.executor_kind, w.kind, w.kind_version, w.required_labels::jsonb
  from unnest($1::text[], $2::text[], $3::text[], $4::text[])
       as w (executor_kind, kind, kind_version, required_labels)
on conflict do nothing;

-- name: definition_routes_after
select route_id, executor_kind, kind, kind_version, required_labels::text as required_labels
  from rara.route
 where route_id > $1
 order by route_id;
