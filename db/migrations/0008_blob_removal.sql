-- migrate:up

-- Until when bytes of a marked blob may still be going away: a deletion was begun, and perhaps nobody waits for its
-- answer any more. Until then nobody uploads this digest.
alter table rara.blob add column removing_until timestamptz;

-- Whether an upload of a digest may begin. Waits for a collection that claims the digest just now, and looks after
-- that: a statement's own snapshot would be older than its wait, that of a volatile function's query is not.
create function rara.digest_is_free(wanted text) returns boolean language plpgsql volatile as $$
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('rara.blob ' || wanted, 0));
    return not exists (select from rara.blob where sha256 = wanted and removing_until > clock_timestamp());
end
$$;

-- migrate:down

drop function rara.digest_is_free;
alter table rara.blob drop column removing_until;
