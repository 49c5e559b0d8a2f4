-- migrate:up

-- When a blob was last uploaded, or somebody was told that it is there and need not be uploaded: garbage collection
-- leaves it alone for a while after that.
alter table rara.blob add column used_at timestamptz not null default now();

-- When an upload's blob was recorded: its row stays a little longer, and keeps the blob from nobody.
alter table rara.upload add column finished_at timestamptz;

-- Built in place: no release had rows to collect yet.
-- squawk-ignore require-concurrent-index-creation
create index blob_marked on rara.blob (sha256) where marked_at is not null; -- garbage_marked
-- squawk-ignore require-concurrent-index-creation
create index run_artifact_sha256 on rara.run_artifact (sha256) where inline is null; -- blob_is_needed

-- The SHA-256 digests that a stored JSON value spells out. None where the text is too short for one.
create function rara.digests_in(value bytea) returns text[] language sql immutable parallel safe as $$
    select case when length(value) < 64 then '{}'::text[]
                else array(select distinct m[1]
                             from regexp_matches(convert_from(value, 'UTF8'), '\m([0-9a-f]{64})\M', 'g') m)
           end
$$;
-- squawk-ignore require-concurrent-index-creation
create index effect_digests on rara.effect using gin (rara.digests_in(result))
    where length(result) >= 64; -- blob_is_needed

-- Whether history refers to a blob: a manifest, a run's input, a checkpoint or an effect that an attempt may still be
-- given. Uploads are no history. The one place that says so: marking, removing and reports ask it.
create function rara.blob_is_needed(wanted text) returns boolean language plpgsql stable as $$
begin
    return exists (select from rara.artifact a where a.sha256 = wanted and a.inline is null)
        or exists (select from rara.run_artifact r where r.sha256 = wanted and r.inline is null)
        -- Nobody is given the checkpoint or the effects of a step that has succeeded.
        or exists (select
                     from rara.checkpoint_artifact a
                     join rara.checkpoint c on c.idempotency_key = a.idempotency_key
                    where a.sha256 = wanted
                      and not exists (select from rara.result x
                                       where x.step_run_id = c.step_run_id and x.state = 'succeeded'))
        or exists (select
                     from rara.effect e
                    where length(e.result) >= 64 and rara.digests_in(e.result) @> array[wanted]
                      and not exists (select from rara.result x
                                       where x.step_run_id = e.step_run_id and x.state = 'succeeded'));
end
$$;

-- migrate:down

drop function rara.blob_is_needed;
drop index rara.effect_digests;
drop function rara.digests_in;
drop index rara.run_artifact_sha256;
drop index rara.blob_marked;
alter table rara.upload drop column finished_at;
alter table rara.blob drop column used_at;
