-- Garbage collection of blobs: mark, wait, look again, remove the bytes, then the row.
--
-- A manifest is committed under a share lock on the blob rows that it names, and only if they are not marked; so a row
-- that was locked, found unused in a later statement and marked can gain no reference. An upload registers itself under
-- the digest's lock (create_upload) before it stores a byte, and counts only while it is registered (record_blob). A
-- claim takes that lock, finds no upload registered, and says in the row until when its removal may last; until then
-- no upload begins, whatever becomes of the collector. So bytes that are removed under a claim are nobody's.

-- name: garbage_page
-- The next $2 blobs behind the digest $1, and which of them nothing refers to and nobody used for $3 seconds.
with page as materialized (
    select sha256, size_bytes, marked_at, used_at
      from rara.blob
     where sha256 > $1::text
     order by sha256
     limit $2::int
)
select sha256, size_bytes, marked_at is not null as is_marked,
       used_at <= now() - make_interval(secs => $3::float8) and not rara.blob_is_needed(sha256) as is_unused
  from page
 order by sha256;

-- name: garbage_lock
-- Those of the blobs $1 that count and that nobody holds: a commit that names one keeps it.
select sha256
  from rara.blob
 where sha256 = any($1::text[]) and marked_at is null
 order by sha256
   for update skip locked;

-- name: garbage_mark
-- Mark those of the blobs $1 that are unused still. They were locked by an earlier statement: this one sees whatever
-- was committed until then. Their finished uploads go, so that a repeated call cannot finish one again.
with marked as (
    update rara.blob b
       set marked_at = now()
     where b.sha256 = any($1::text[])
       and b.marked_at is null
       and b.used_at <= now() - make_interval(secs => $2::float8)
       and not exists (select from rara.upload u
                        where u.sha256 = b.sha256 and u.finished_at is null and u.expires_at > now())
       and not rara.blob_is_needed(b.sha256)
    returning b.sha256, b.size_bytes
), over as (
    delete from rara.upload u
     using marked m
     where u.sha256 = m.sha256 and u.finished_at is not null
)
select sha256, size_bytes
  from marked;

-- name: garbage_unknown
-- Which of the digests $1 have no row and no upload: bytes that a crash has left.
select d.sha256
  from unnest($1::text[]) d (sha256)
 where not exists (select from rara.blob b where b.sha256 = d.sha256)
   and not exists (select from rara.upload u where u.sha256 = d.sha256);

-- name: garbage_adopt
-- Give such bytes (digests $1, sizes $2) a row that is marked: from here on they are removed as all others are.
insert into rara.blob (sha256, size_bytes, marked_at)
select d.sha256, d.size_bytes, now()
  from unnest($1::text[], $2::bigint[]) d (sha256, size_bytes)
 where not exists (select from rara.upload u where u.sha256 = d.sha256)
 order by d.sha256
    on conflict do nothing
returning sha256, size_bytes;

-- name: garbage_marked
-- The next $2 blobs behind the digest $1 that were marked at least $3 seconds ago.
select sha256
  from rara.blob
 where sha256 > $1::text
   and marked_at <= now() - make_interval(secs => $3::float8)
 order by sha256
 limit $2::int;

-- name: garbage_lock_digests
-- The locks of the digests $1 until the end of this transaction, as far as nobody else has them.
select d.sha256
  from unnest($1::text[]) d (sha256)
 where pg_try_advisory_xact_lock(hashtextextended('rara.blob ' || d.sha256, 0));

-- name: garbage_claim
-- Claim, for $3 seconds, those of the blobs $1 that are marked still and nobody's, and that no other collection is
-- removing or may have been removing. Damaged ones are marked too, and needed: they stay. The end is the claim's name.
with free as materialized (
    select b.sha256
      from rara.blob b
     where b.sha256 = any($1::text[])
       and b.marked_at <= now() - make_interval(secs => $2::float8)
       and coalesce(b.removing_until <= clock_timestamp(), true)
       and not exists (select from rara.upload u where u.sha256 = b.sha256)
       and not rara.blob_is_needed(b.sha256)
     order by b.sha256
       for update skip locked
), claim as materialized (
    select clock_timestamp() + make_interval(secs => $3::float8) as removing_until
)
update rara.blob b
   set removing_until = c.removing_until
  from free f, claim c
 where b.sha256 = f.sha256
returning b.sha256, b.size_bytes, b.removing_until;

-- name: garbage_still_claimed
-- Those of the blobs $1 whose claim that ends at $2 is not over.
select sha256
  from rara.blob
 where sha256 = any($1::text[]) and removing_until = $2 and removing_until > clock_timestamp();

-- name: garbage_forget
-- The bytes of the blobs $1, claimed until $2, are gone, and no deletion of them is under way.
delete from rara.blob
 where sha256 = any($1::text[]) and removing_until = $2;

-- name: garbage_release
-- The blobs $1, claimed until $2, are as they were, and no deletion of them is under way.
update rara.blob
   set removing_until = null
 where sha256 = any($1::text[]) and removing_until = $2;

-- name: garbage_lasting_uploads
-- Which of the ids $1 are uploads whose time is not over.
select upload_id::text as upload_id
  from rara.upload
 where upload_id = any($1::uuid[]) and expires_at > now();
