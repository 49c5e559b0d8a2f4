-- name: create_partitions
select created from rara.create_history_partitions($1::int) created;
