-- After a database came back from a backup.

-- name: raise_lease_tokens
-- Lease tokens go on above all that were granted since the backup: 2^40 further, which no scheduler grants in between,
-- and which may be done eight million times.
select setval('rara.lease_token_seq', nextval('rara.lease_token_seq') + 1099511627776);
