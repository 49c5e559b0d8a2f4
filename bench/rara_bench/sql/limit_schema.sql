-- The least that a durable step needs: who it is, that it waits, who has it, how it ended, and what it said.
create table life_run (
    run_id bigint primary key,
    succeeded bigint not null default 0
) with (fillfactor = 60);
create table life_step (
    step_id bigint generated always as identity primary key,
    run_id bigint not null,
    kind text not null,
    input bytea not null,
    created_at timestamptz not null default now()
);
create table life_ready (
    priority int not null,
    step_id bigint not null,
    primary key (priority, step_id)
);
create table life_lease (
    step_id bigint primary key,
    token bigint not null,
    owner int not null,
    attempt int not null,
    granted_at timestamptz not null,
    started_at timestamptz
) with (fillfactor = 60);
create table life_result (
    step_id bigint primary key,
    token bigint not null,
    output bytea not null,
    ended_at timestamptz not null
);
create table life_event (
    step_id bigint not null,
    attempt int not null,
    sequence int not null,
    type text not null,
    body bytea,
    stored_at timestamptz not null default now(),
    primary key (step_id, attempt, sequence)
);
create sequence life_token;
insert into life_run (run_id) select n from generate_series(1, 2000) n;
