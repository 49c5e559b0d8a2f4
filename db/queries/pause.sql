-- Pausing kinds and definitions, and what that does to ready steps. `rara.pause` has few rows.

-- name: pauses
-- All that is paused, and what is being resumed, the newest first.
select pause_id, kind, definition, reason, paused_by, paused_at, resumed_at
  from rara.pause
 order by pause_id desc;

-- name: pause_lock
-- One caller at a time counts and stores pauses, to the end of its transaction.
select pg_advisory_xact_lock(hashtextextended('rara.pause', 0));

-- name: pause_current
-- The pause of the kind $1 or of the definition $2, and how many there are of all.
select p.pause_id, p.kind, p.definition, p.reason, p.paused_by, p.paused_at, p.resumed_at
  from rara.pause p
 where (p.kind = $1 or p.definition = $2) and p.resumed_at is null;

-- name: pause_count
select count(*)::int from rara.pause;

-- name: pause_insert
-- Called under pause_lock.
insert into rara.pause (kind, definition, reason, paused_by)
values ($1, $2, $3, $4)
returning pause_id, kind, definition, reason, paused_by, paused_at, resumed_at;

-- name: pause_end
-- Waits for whoever puts steps aside under it: after this has committed nobody does any more.
update rara.pause p
   set resumed_at = now()
 where (p.kind = $1 or p.definition = $2) and p.resumed_at is null
returning p.pause_id, p.kind, p.definition, p.reason, p.paused_by, p.paused_at, p.resumed_at;

-- name: pause_remove
-- Of a pause that is over: gone, once nothing stands aside under it.
delete from rara.pause p
 where p.pause_id = $1 and p.resumed_at is not null
   and not exists (select from rara.ready r where r.route_id = -$1::int)
returning p.pause_id;

-- name: kinds_known
-- Every kind that a registered definition uses.
select distinct kind as name from rara.route;

-- name: definitions_known
select distinct definition as name from rara.definition;

-- name: hold_ready
-- Look at up to $4 ready steps behind ($1 route, $2 available_at, $3 step), up to the route $5, and put those of paused
-- definitions aside. Rows that somebody holds are left for the next look. The runs are looked up one by one, and the
-- rows written by their place: however many are ready, a look costs the same.
with paused as materialized (
    select p.pause_id, p.definition
      from rara.pause p
     where p.definition is not null and p.resumed_at is null
       for share -- a resume comes before, and then its pause is not among them, or waits for us
), walked as materialized (
    select r.route_id, r.available_at, r.step_run_id, r.workflow_run_id
      from rara.ready r
     where (r.route_id, r.available_at, r.step_run_id) > ($1::int, $2::timestamptz, $3::uuid)
       and r.route_id <= $5::int
     order by r.route_id, r.available_at, r.step_run_id
     limit $4::int
), found as materialized (
    select f.place
      from walked w
     cross join lateral (
           select n.definition from rara.workflow_run n where n.workflow_run_id = w.workflow_run_id offset 0
           ) n
      join paused p on p.definition = n.definition
     cross join lateral (
           select r.ctid as place
             from rara.ready r
            where r.step_run_id = w.step_run_id and r.route_id = w.route_id
              for update skip locked
           ) f
), held as (
    update rara.ready r
       set route_id = -(select p.pause_id
                          from rara.workflow_run n
                          join paused p on p.definition = n.definition
                         where n.workflow_run_id = r.workflow_run_id)
     where r.ctid = any (array(select place from found))
    returning r.step_run_id
)
select (select count(*) from walked)::int as walked, (select count(*) from held)::int as held,
       l.route_id, l.available_at, l.step_run_id
  from (select) one
  left join (select * from walked order by route_id desc, available_at desc, step_run_id desc limit 1) l on true;

-- name: release_held
-- Up to $2 steps that stand aside under the pause $1, which is over, are ready again, the oldest first. Their wait for
-- a capable executor begins anew.
with back as materialized (
    select r.ctid as place
      from rara.ready r
     where r.route_id = -$1::int
       and exists (select from rara.pause p where p.pause_id = $1 and p.resumed_at is not null)
     order by r.available_at, r.step_run_id
     limit $2::int
       for update skip locked
)
update rara.ready r
   set route_id = (select s.route_id from rara.step_run s where s.step_run_id = r.step_run_id),
       schedule_deadline = now() + (select s.schedule_timeout from rara.step_run s where s.step_run_id = r.step_run_id)
 where r.ctid = any (array(select place from back))
returning r.step_run_id::text;

-- name: routes_of_kind
-- From the table: a scheduler may not have loaded them all yet.
select route_id from rara.route where kind = $1 order by route_id;

-- name: restart_waits
-- Of up to $5 ready steps of the route $1 behind ($2 available_at, $3 step) the wait for a capable executor begins
-- anew at $4, when the kind was resumed, unless it ends later already. Rows that somebody holds are left, and counted:
-- whoever holds them does not wait for us, nor we for them. Each is looked up by its key, locked, and written by its
-- place, which stays as long as the lock.
with walked as materialized (
    select r.available_at, r.step_run_id, r.schedule_deadline
      from rara.ready r
     where r.route_id = $1::int and (r.available_at, r.step_run_id) > ($2::timestamptz, $3::uuid)
     order by r.available_at, r.step_run_id
     limit $5::int
), due as materialized (
    select w.step_run_id
      from walked w
     cross join lateral (
           select s.schedule_timeout from rara.step_run s where s.step_run_id = w.step_run_id offset 0
           ) s
     where w.available_at < $4::timestamptz and w.schedule_deadline < $4::timestamptz + s.schedule_timeout
     order by w.step_run_id
), found as materialized (
    select f.place
      from due d
     cross join lateral (
           select r.ctid as place
             from rara.ready r
            where r.step_run_id = d.step_run_id and r.route_id = $1::int
              for update skip locked
           ) f
), renewed as (
    update rara.ready r
       set schedule_deadline = $4::timestamptz
                               + (select s.schedule_timeout from rara.step_run s where s.step_run_id = r.step_run_id)
     where r.ctid = any (array(select place from found))
    returning r.step_run_id
)
select (select count(*) from walked)::int as walked, (select count(*) from renewed)::int as renewed,
       (select count(*) from due)::int - (select count(*) from renewed)::int as left_out, l.available_at, l.step_run_id
  from (select) one
  left join (select * from walked order by available_at desc, step_run_id desc limit 1) l on true;

-- name: pause_load
-- What each of the pauses $1 holds back, counted up to $2, and what of it is leased or runs. The leases are counted
-- once for all pauses, and each run among them is looked up by its key.
with leased as materialized (
    select l.route_id, l.workflow_run_id, count(*) as n
      from rara.lease l
     group by l.route_id, l.workflow_run_id
), running as materialized (
    select q.kind, n.definition, sum(l.n) as n
      from leased l
      join rara.route q on q.route_id = l.route_id
     cross join lateral (
           select w.definition from rara.workflow_run w where w.workflow_run_id = l.workflow_run_id offset 0
           ) n
     group by q.kind, n.definition
)
select p.pause_id,
       case when p.definition is not null
            then (select count(*) from (select from rara.ready r where r.route_id = -p.pause_id limit $2::int) h)
            else (select coalesce(sum(k.n), 0)
                    from rara.route q
                   cross join lateral (
                         select count(*) as n
                           from (select from rara.ready r where r.route_id = q.route_id limit $2::int) h
                         ) k
                   where q.kind = p.kind)
       end::bigint as held,
       (select coalesce(sum(r.n), 0)
          from running r
         where r.kind = p.kind or r.definition = p.definition)::bigint as in_flight
  from rara.pause p
 where p.pause_id = any ($1::int[]);

-- name: explain_pauses
-- What holds back the step $1: the pause of its kind, and that of its run's definition.
select p.pause_id, p.kind, p.definition, p.reason, p.paused_by, p.paused_at, p.resumed_at
  from rara.step_run s
  join rara.route q on q.route_id = s.route_id
  join rara.workflow_run n on n.workflow_run_id = s.workflow_run_id
  join rara.pause p on p.kind = q.kind or p.definition = n.definition
 where s.step_run_id = $1::uuid and p.resumed_at is null
 order by p.pause_id;

-- name: held_back
-- How much is paused, and how many ready steps stand aside, counted up to $1.
select (select count(*) from rara.pause where kind is not null and resumed_at is null)::int as kinds,
       (select count(*) from rara.pause where definition is not null and resumed_at is null)::int as definitions,
       (select count(*) from (select from rara.ready where route_id < 0 limit $1::int) h)::int as held;
