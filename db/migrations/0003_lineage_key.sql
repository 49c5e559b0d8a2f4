-- migrate:up

-- The same key in the order in which walks read it: the makers of a digest stand together, and so do its users, by
-- step. Behind the step, as it was, the one maker of a digest that thousands of steps used was found among them all.
-- Built in place: no release had this table yet.
-- squawk-ignore ban-drop-constraint
alter table rara.lineage drop constraint lineage_pkey;
-- squawk-ignore constraint-missing-not-valid, adding-serial-primary-key-field
alter table rara.lineage add primary key (sha256, produced, step_run_id, attempt, name);

-- migrate:down

alter table rara.lineage drop constraint lineage_pkey;
alter table rara.lineage add primary key (sha256, step_run_id, attempt, produced, name);
