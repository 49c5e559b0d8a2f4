-- migrate:up

-- The version of its kind that the executor was asked to run, as the grant chose it. Null: granted before this
-- column was there. What kind of executor it was stands in rara.executor, which is never removed.
alter table rara.lease add column kind_version text;
alter table rara.result add column kind_version text;
alter table rara.step_attempt add column kind_version text;

-- migrate:down

alter table rara.step_attempt drop column kind_version;
alter table rara.result drop column kind_version;
alter table rara.lease drop column kind_version;
