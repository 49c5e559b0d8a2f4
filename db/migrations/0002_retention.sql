-- migrate:up

-- How the newest look for what is past retention went, for people and for alarms. One row.
create table rara.retention (
    is_here boolean primary key default true check (is_here),
    last_success_at timestamptz,
    last_failure_at timestamptz,
    failed_cycles int not null default 0 check (failed_cycles >= 0), -- since the last success
    error text
);
insert into rara.retention default values;

-- What is found or checked when a run goes. Built in place: no release had these tables yet.
-- squawk-ignore require-concurrent-index-creation
create index workflow_run_ended on rara.workflow_run (ended_at desc, workflow_run_id desc)
    where ended_at is not null; -- expired_runs
-- squawk-ignore require-concurrent-index-creation
create index workflow_run_retries on rara.workflow_run (retry_of_workflow_run_id)
    where retry_of_workflow_run_id is not null;
-- squawk-ignore require-concurrent-index-creation
create index reused_step_step on rara.reused_step (step_run_id);

-- Closed rows go by remove_runs alone, which switches this on for itself. Definitions never go. (It does so in its body:
-- only a superuser may say `set` of a setting of our own in a function's head.)
create or replace function rara.refuse_change() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and tg_table_name <> 'definition'
       and current_setting('rara.removes_runs', true) = 'on' then
        return old;
    end if;
    raise exception 'a row of rara.% is final: % refused', tg_table_name, lower(tg_op)
        using errcode = 'restrict_violation';
end
$$;

-- Removes those of the runs `wanted` that ended before `before_instant` and that nothing needs any more: no retry of
-- theirs is left, nobody uses one of their steps, and the keys that started them are older than a week. Returns how
-- many runs and steps went. Their history goes with its days.
create function rara.remove_runs(wanted uuid[], before_instant timestamptz, out runs int, out steps int)
    language plpgsql as $$
declare
    gone uuid[];
    kept uuid[];
begin
    -- Locked first and judged in a later statement, which sees what somebody committed while we waited.
    select coalesce(array_agg(r.workflow_run_id), '{}') into gone
      from (select w.workflow_run_id
              from rara.workflow_run w
             where w.workflow_run_id = any (wanted)
             order by w.workflow_run_id
               for update skip locked) r;
    select coalesce(array_agg(w.workflow_run_id), '{}') into gone
      from rara.workflow_run w
     where w.workflow_run_id = any (gone)
       and w.ended_at < before_instant
       and not exists (select from rara.start_key k
                        where k.workflow_run_id = w.workflow_run_id and k.created_at > now() - interval '7 days');
    loop -- a run may go together with all of its retries
        select array_agg(w.workflow_run_id) into kept
          from rara.workflow_run w
         where w.workflow_run_id = any (gone)
           and (exists (select from rara.workflow_run r
                         where r.retry_of_workflow_run_id = w.workflow_run_id and r.workflow_run_id <> all (gone))
                or exists (select from rara.step_run s
                             join rara.reused_step u on u.step_run_id = s.step_run_id
                            where s.workflow_run_id = w.workflow_run_id and u.workflow_run_id <> all (gone)));
        exit when kept is null;
        gone := array(select g.run_id from unnest(gone) g (run_id) where g.run_id <> all (kept));
    end loop;
    runs := cardinality(gone);
    steps := 0;
    if runs = 0 then
        return;
    end if;

    perform set_config('rara.removes_runs', 'on', true);
    delete from rara.start_key k where k.workflow_run_id = any (gone);
    delete from rara.run_artifact a where a.workflow_run_id = any (gone);
    delete from rara.reused_step u where u.workflow_run_id = any (gone);
    -- A step that goes on for another uses that one's key: effects and checkpoint go with the first of them.
    delete from rara.effect e using rara.step_run s
     where s.workflow_run_id = any (gone) and s.retry_of_step_run_id is null and e.idempotency_key = s.idempotency_key;
    delete from rara.checkpoint c using rara.step_run s
     where s.workflow_run_id = any (gone) and s.retry_of_step_run_id is null and c.idempotency_key = s.idempotency_key;
    delete from rara.lineage l where l.workflow_run_id = any (gone);
    delete from rara.artifact a using rara.step_run s
     where s.workflow_run_id = any (gone) and a.step_run_id = s.step_run_id;
    delete from rara.step_dependency d using rara.step_run s
     where s.workflow_run_id = any (gone) and d.step_run_id = s.step_run_id;
    delete from rara.result x where x.workflow_run_id = any (gone);
    delete from rara.step_run s where s.workflow_run_id = any (gone);
    get diagnostics steps = row_count;
    delete from rara.workflow_run w where w.workflow_run_id = any (gone);
    perform set_config('rara.removes_runs', 'off', true);
end
$$;

-- Drops one day of history, of one table, that lies more than `days` back and in which no run that is left has been
-- at work; returns its name, or null where there is none. One a call, since the drop locks out writers until the end
-- of its transaction; for the same reason it gives up soon when readers are in the way.
create function rara.drop_history_partition(days int) returns text language plpgsql set lock_timeout = '200ms' as $$
declare
    part record;
    is_needed boolean;
begin
    for part in
        select c.relname as name, p.relname as parent, to_date(right(c.relname, 8), 'YYYYMMDD') as day
          from pg_inherits i
          join pg_class c on c.oid = i.inhrelid
          join pg_class p on p.oid = i.inhparent
         where i.inhparent in ('rara.step_event'::regclass, 'rara.step_attempt'::regclass)
           and c.relname ~ '^step_(event|attempt)_\d{8}$'
           and to_date(right(c.relname, 8), 'YYYYMMDD') < (now() at time zone 'UTC')::date - days
         order by 3, 1
    loop
        -- Days are compared by when runs lived, and only runs that lived on that day are looked up in it.
        execute format(
            'select exists (select from rara.workflow_run r
                              join rara.step_run s on s.workflow_run_id = r.workflow_run_id
                             where r.created_at < $3 and (r.ended_at is null or r.ended_at >= $2)
                               and exists (select from rara.%I h
                                            where h.granted_on = $1 and h.step_run_id = s.step_run_id))',
            part.name) into is_needed
            using part.day, part.day::timestamp at time zone 'UTC', (part.day + 1)::timestamp at time zone 'UTC';
        continue when is_needed;
        begin
            execute format('drop table rara.%I', part.name);
            return part.name;
        exception when lock_not_available then
            continue;
        end;
    end loop;
    return null;
end
$$;

-- migrate:down

drop function rara.drop_history_partition;
drop function rara.remove_runs;
create or replace function rara.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'a row of rara.% is final: % refused', tg_table_name, lower(tg_op)
        using errcode = 'restrict_violation';
end
$$;
drop index rara.reused_step_step;
drop index rara.workflow_run_retries;
drop index rara.workflow_run_ended;
drop table rara.retention;
