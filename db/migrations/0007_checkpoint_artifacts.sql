-- migrate:up

-- The blobs that a checkpoint needs. A row keeps its blob from garbage collection for as long as the checkpoint stays:
-- they are replaced in one statement and removed together.
create table rara.checkpoint_artifact (
    idempotency_key text not null references rara.checkpoint on delete cascade,
    lease_token bigint not null, -- the checkpoint's, like the next; in the key, so that old and new never collide
    sequence bigint not null,
    name text not null,
    position int not null,
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null check (size_bytes >= 0), -- 0: the empty blob, which no store need hold
    media_type text not null,
    type text not null,
    primary key (idempotency_key, lease_token, sequence, name)
);
-- squawk-ignore require-concurrent-index-creation
create index checkpoint_artifact_sha256 on rara.checkpoint_artifact (sha256); -- garbage collection

-- migrate:down

drop table rara.checkpoint_artifact;
