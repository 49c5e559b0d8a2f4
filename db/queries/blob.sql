-- Blobs and uploads. A blob counts when its row is here and not marked for deletion, whatever lies in the store.

-- name: known_blobs
-- Which of the digests $1 (SHA-256) with the sizes $2, by position, count; in no order.
-- Whoever is told so need not upload them: garbage collection leaves them alone for a while. Not written at each call,
-- nor where a commit or a collection holds the row.
with used as (
    select b.sha256
      from rara.blob b
     where b.sha256 = any($1::text[]) and b.marked_at is null and b.used_at < now() - interval '5 minutes'
     order by b.sha256
       for no key update skip locked
), noted as (
    update rara.blob b
       set used_at = now()
      from used
     where b.sha256 = used.sha256
)
select b.sha256, b.size_bytes
  from unnest($1::text[], $2::bigint[]) as wanted (sha256, size_bytes)
  join rara.blob b on b.sha256 = wanted.sha256 and b.size_bytes = wanted.size_bytes
 where b.marked_at is null;

-- name: get_blob
-- The size under which a SHA-256 is known; no row: it is not, or it is marked.
select size_bytes
  from rara.blob
 where sha256 = $1 and marked_at is null;

-- name: use_blob
-- The same for somebody who need not upload it then; see known_blobs.
with used as (
    select b.sha256
      from rara.blob b
     where b.sha256 = $1::text and b.marked_at is null and b.used_at < now() - interval '5 minutes'
       for no key update skip locked
), noted as (
    update rara.blob b
       set used_at = now()
      from used
     where b.sha256 = used.sha256
)
select size_bytes
  from rara.blob
 where sha256 = $1::text and marked_at is null;

-- name: record_blob
-- The bytes are durable and were hashed by us. A row that was marked counts again: its bytes have just been written.
-- The upload $3 is kept a little, so that a caller who missed the answer gets it again. No row back: the upload was
-- removed meanwhile, and with it what kept its bytes from garbage collection.
with upload as (
    update rara.upload
       set expires_at = least(expires_at, now() + interval '10 minutes'),
           finished_at = now()
     where upload_id = $3::uuid
    returning upload_id
)
insert into rara.blob (sha256, size_bytes)
select $1, $2
 where $3::uuid is null or exists (select from upload)
    on conflict (sha256) do update
   set marked_at = null,
       removing_until = null,
       verified_at = now(),
       used_at = now(),
       size_bytes = excluded.size_bytes
returning sha256;

-- name: blob_time
select now();

-- name: mark_blob
-- Its bytes were gone or had changed when somebody looked, later than $2: what was uploaded before counts as missing,
-- and a new upload can heal it.
update rara.blob
   set marked_at = now()
 where sha256 = $1 and marked_at is null and verified_at <= $2;

-- name: create_upload
-- $4 and $5 name the lease of an executor's upload; null for a client's. expires_at is null where the lease is gone, and
-- where the digest is not free: a collection that claims it is waited for, bytes that are going away are not.
with digest as materialized (
    select rara.digest_is_free($2::text) as is_free
), created as (
    insert into rara.upload (upload_id, sha256, size_bytes, step_run_id, lease_token, expires_at)
    select $1::uuid, $2::text, $3::bigint, $4::uuid, $5::bigint, now() + make_interval(secs => $6::float8)
      from digest
     where is_free
       and ($4::uuid is null
            or exists (
                select
                  from rara.lease l
                 where l.step_run_id = $4 and l.lease_token = $5
            ))
    returning expires_at
)
select d.is_free, c.expires_at
  from digest d
  left join created c on true;

-- name: get_upload
-- An upload that has not expired, whether its lease (if it has one) is current, and whether its blob counts.
select u.sha256, u.size_bytes,
       u.step_run_id::text as step_run_id,
       (u.step_run_id is null or l.step_run_id is not null) as lease_is_current,
       b.sha256 is not null as is_complete
  from rara.upload u
  left join rara.lease l on l.step_run_id = u.step_run_id and l.lease_token = u.lease_token
  left join rara.blob b on b.sha256 = u.sha256 and b.size_bytes = u.size_bytes and b.marked_at is null
 where u.upload_id = $1 and u.expires_at > now();

-- name: delete_upload
delete from rara.upload
 where upload_id = $1;

-- name: expired_uploads
-- Up to $1 uploads whose time is over, oldest first.
select upload_id::text as upload_id
  from rara.upload
 where expires_at <= now()
 order by expires_at
 limit $1;

-- name: resumable_uploads
-- Up to $4 open uploads of SHA-256 $1 and size $2 that step $3 (null: a client) may go on with, newest first.
select upload_id::text as upload_id
  from rara.upload
 where sha256 = $1 and size_bytes = $2
   and step_run_id is not distinct from $3::uuid
   and expires_at > now()
 order by created_at desc, upload_id
 limit $4;

-- name: adopt_upload
-- From now on upload $1 belongs to lease $3 of step $2, and no more to an earlier one; null for a client's.
update rara.upload u
   set lease_token = $3::bigint,
       expires_at = greatest(u.expires_at, now() + make_interval(secs => $4::float8))
 where u.upload_id = $1
   and u.step_run_id is not distinct from $2::uuid
   and u.expires_at > now()
   and ($2::uuid is null
        or exists (
            select
              from rara.lease l
             where l.step_run_id = $2 and l.lease_token = $3
        ))
returning u.expires_at;

-- name: lease_load
-- Uploads of lease token $1 whose blob does not count yet, and the bytes that all of its uploads have named. Those of
-- finished ones are kept for ten minutes, so this stops what grows fast; the manifest's own limit is exact.
select count(*) filter (where b.sha256 is null) as open_uploads,
       coalesce(sum(u.size_bytes), 0)::bigint as named_bytes
  from rara.upload u
  left join rara.blob b on b.sha256 = u.sha256 and b.size_bytes = u.size_bytes and b.marked_at is null
 where u.lease_token = $1;

-- name: store_load
-- Open uploads and their bytes; $1: and the bytes of all blobs, each of which is read. Those marked for deletion still
-- take room.
with begun as (
    select u.size_bytes
      from rara.upload u
     where u.expires_at > now()
       and u.finished_at is null
       and not exists (
            select
              from rara.blob b
             where b.sha256 = u.sha256 and b.size_bytes = u.size_bytes and b.marked_at is null
        )
)
select count(*) as open_uploads,
       (coalesce(sum(size_bytes), 0)
        + case when $1::bool then (select coalesce(sum(b.size_bytes), 0) from rara.blob b) else 0 end
       )::bigint as used_bytes
  from begun;
