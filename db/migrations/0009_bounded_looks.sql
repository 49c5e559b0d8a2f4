-- migrate:up

-- How many digests an output was derived from is told by the room that they take, without reading them: so they must
-- not be compressed. Digests have nothing to compress, unless somebody chooses them so.
alter table rara.lineage alter column derived_from set storage external;

-- Built in place: no release had many uploads yet.
-- squawk-ignore require-concurrent-index-creation
create index upload_lease on rara.upload (lease_token) where lease_token is not null; -- lease_load

-- migrate:down

drop index rara.upload_lease;
alter table rara.lineage alter column derived_from set storage extended;
