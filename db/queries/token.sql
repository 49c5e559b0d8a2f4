-- Bearer tokens. Statements never see a token's text, only its SHA-256.

-- name: create_token
-- $7: seconds until it expires; null: never.
insert into rara.token (token_id, name, role, token_hash, kinds, executor_kind, expires_at)
values ($1::uuid, $2, $3, $4, $5::text[], $6, now() + make_interval(secs => $7::float8))
returning expires_at;

-- name: list_tokens
-- The newest first. With $1 also those that are of no use any more.
select token_id::text as token_id, name, role, kinds, executor_kind, created_at, expires_at, revoked_at, last_used_at,
       case when revoked_at is not null then 'revoked' when expires_at <= now() then 'expired' else 'active' end as state
  from rara.token
 where $1::bool or (revoked_at is null and (expires_at is null or expires_at > now()))
 order by created_at desc, token_id;

-- name: revoke_tokens
-- Those with an id or a name among $1, if they are not revoked already.
update rara.token
   set revoked_at = now()
 where (token_id::text = any($1::text[]) or name = any($1::text[])) and revoked_at is null
returning token_id::text as token_id, name;

-- name: find_token
-- The token with the hash $1, and how many seconds it has left; null: it does not expire.
select token_id::text as token_id, name, role, token_hash, kinds, executor_kind, revoked_at is not null as is_revoked,
       extract(epoch from expires_at - now())::float8 as expires_in_s
  from rara.token
 where token_hash = $1;

-- name: valid_tokens
-- Which of the tokens $1 are neither revoked nor expired.
select token_id::text as token_id
  from rara.token
 where token_id = any($1::uuid[]) and revoked_at is null and (expires_at is null or expires_at > now());

-- name: note_token_use
-- The tokens $1 are in use; written once a minute at most.
update rara.token
   set last_used_at = now()
 where token_id = any($1::uuid[]) and (last_used_at is null or last_used_at < now() - interval '1 minute');

-- name: lease_bearer
-- Who holds the lease $2 of step $1, and what for.
select x.token_name, x.direct, x.executor_kind, t.kind
  from rara.lease l
  join rara.executor x on x.executor_id = l.executor_id
  join rara.route t on t.route_id = l.route_id
 where l.step_run_id = $1::uuid and l.lease_token = $2;
