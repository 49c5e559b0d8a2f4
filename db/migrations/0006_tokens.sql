-- migrate:up

-- Bearer tokens of the API. Only their hashes are here; the text is shown once, when a token is made.
create table rara.token (
    token_id uuid primary key,
    name text not null check (length(name) between 1 and 63), -- whose it is; several tokens may have one name
    role text not null check (role in ('client', 'executor', 'operator')),
    token_hash bytea not null unique check (octet_length(token_hash) = 32), -- SHA-256 of the whole text
    kinds text[] not null default '{}', -- what an executor may offer: a kind, 'prefix.*' or '*'
    executor_kind text, -- the only executor_kind that it may claim; null: any
    created_at timestamptz not null default now(),
    expires_at timestamptz, -- null: never
    revoked_at timestamptz,
    last_used_at timestamptz, -- to a minute
    check ((role = 'executor') = (cardinality(kinds) > 0)),
    check (executor_kind is null or role = 'executor')
);

-- The name of the token by which an executor came: nobody else takes its sessions and leases over. Null: it came
-- without one.
alter table rara.executor add column token_name text;

-- migrate:down

alter table rara.executor drop column token_name;
drop table rara.token;
