-- migrate:up

-- Everything lives in the schema `rara`, so that Rara can share a database with other software.
create schema if not exists rara;

-- The fencing number. CACHE 1: with a larger cache a later grant could get a smaller number.
create sequence rara.lease_token_seq as bigint start 1 cache 1;

-- ---------------------------------------------------------------- definitions

create table rara.definition (
    definition text not null,
    version int not null check (version >= 1),
    content_sha256 text not null check (content_sha256 ~ '^[0-9a-f]{64}$'),
    body bytea not null, -- rara.v1.Definition, serialised; what the hash covers
    created_at timestamptz not null default now(),
    primary key (definition, version),
    unique (definition, content_sha256)
);

-- What a set of steps asks of an executor: the unit of leasing order. Interned when a definition is registered.
create table rara.route (
    route_id int generated always as identity primary key,
    executor_kind text not null, -- empty: any
    kind text not null,
    kind_version text not null, -- a version or its first parts; empty: any
    required_labels jsonb not null,
    unique (executor_kind, kind, kind_version, required_labels)
);

-- ---------------------------------------------------------------- runs

-- Definitions and routes are never removed, so rows here name them without a foreign key: each check would lock
-- the one definition row that thousands of starts share.
create table rara.workflow_run (
    workflow_run_id uuid primary key,
    definition text not null,
    definition_version int not null,
    state text not null default 'pending'
        check (state in ('pending', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled')),
    revision bigint not null default 1, -- raised under this row's lock with every stored change of the run or its steps
    steps_total int not null check (steps_total >= 1),
    -- Results that exist, by outcome. Raised in the transaction that inserts them, by the rows really inserted.
    steps_succeeded int not null default 0,
    steps_failed int not null default 0, -- terminal_failed, or cancelled for a reason that fails the run
    steps_cancelled int not null default 0, -- cancelled for any other reason
    on_failure text not null check (on_failure in ('fail_fast', 'continue')),
    input bytea, -- JSON; null: none
    labels jsonb not null default '{}',
    traceparent text not null default '',
    tracestate text not null default '',
    retry_of_workflow_run_id uuid references rara.workflow_run,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    ended_at timestamptz,
    deadline timestamptz,
    cancel_requested_at timestamptz, -- the stored intent
    cancel_reason text, -- CANCELLED, SIBLING_FAILED or DEADLINE_EXCEEDED
    cancel_message text,
    failed_step_run_id uuid, -- the first step that made the run fail
    check (steps_succeeded >= 0 and steps_failed >= 0 and steps_cancelled >= 0),
    check (steps_succeeded + steps_failed + steps_cancelled <= steps_total),
    check ((state in ('succeeded', 'failed', 'cancelled')) = (ended_at is not null)),
    check ((state in ('succeeded', 'failed', 'cancelled'))
           = (steps_succeeded + steps_failed + steps_cancelled = steps_total)),
    check (state <> 'succeeded' or steps_succeeded = steps_total),
    check (state <> 'failed' or steps_failed > 0),
    check (state <> 'cancelled' or (steps_failed = 0 and steps_cancelled > 0)),
    check (state <> 'cancelling' or cancel_requested_at is not null),
    check ((cancel_requested_at is null) = (cancel_reason is null))
) with (fillfactor = 80);

create index workflow_run_created on rara.workflow_run (created_at desc, workflow_run_id desc); -- list_runs
create index workflow_run_definition
    on rara.workflow_run (definition, created_at desc, workflow_run_id desc); -- list_runs by definition
create index workflow_run_deadline on rara.workflow_run (deadline)
    where deadline is not null and ended_at is null; -- overdue_runs
create unique index workflow_run_live_retry on rara.workflow_run (retry_of_workflow_run_id)
    where retry_of_workflow_run_id is not null and ended_at is null; -- one live retry per run

-- A caller's key and what it started. Kept apart from the run, so that it can outlive or precede its retention.
create table rara.start_key (
    idempotency_key text primary key check (length(idempotency_key) between 1 and 255),
    request_sha256 text not null,
    workflow_run_id uuid not null references rara.workflow_run,
    created_at timestamptz not null default now()
);
create index start_key_run on rara.start_key (workflow_run_id);

create table rara.run_artifact ( -- a run's input artifacts
    workflow_run_id uuid not null references rara.workflow_run,
    name text not null,
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null check (size_bytes >= 0),
    media_type text not null,
    type text not null,
    inline bytea,
    metadata bytea,
    primary key (workflow_run_id, name)
);

-- ---------------------------------------------------------------- steps

-- Identity: written once, never changed. Where a step stands is told by the narrow tables below:
-- result -> its state; lease -> leased or running; waiting -> retryable_failed, due later;
-- ready -> pending or retryable_failed, leasable now; none of them -> pending, behind its dependencies.
create table rara.step_run (
    step_run_id uuid primary key,
    workflow_run_id uuid not null references rara.workflow_run,
    step_name text not null,
    route_id int not null,
    retry_of_step_run_id uuid, -- in a retried run: the step whose idempotency key, effects and checkpoint go on
    idempotency_key text not null, -- equal on every attempt
    schedule_timeout interval, -- longest wait for a capable executor, each time it becomes leasable
    unique (workflow_run_id, step_name)
);

-- In a retried run: a step that had succeeded, taken by reference.
create table rara.reused_step (
    workflow_run_id uuid not null references rara.workflow_run,
    step_run_id uuid not null references rara.step_run,
    primary key (workflow_run_id, step_run_id)
);

create table rara.step_dependency ( -- written with its steps, in one statement
    step_run_id uuid not null,
    depends_on_step_run_id uuid not null,
    primary key (step_run_id, depends_on_step_run_id)
);
create index step_dependency_downstream on rara.step_dependency (depends_on_step_run_id); -- release_dependants

-- Leasable now. The primary key is the order in which a route is served.
create table rara.ready (
    route_id int not null,
    available_at timestamptz not null,
    step_run_id uuid not null unique,
    workflow_run_id uuid not null,
    attempt int not null default 0 check (attempt >= 0), -- leases granted so far
    failures int not null default 0 check (failures between 0 and attempt), -- what spent the budget
    free_endings int not null default 0 check (free_endings >= 0), -- consecutive endings that spent nothing
    reason text not null default '', -- of the last attempt; empty before the first
    released_at timestamptz not null, -- its dependencies had succeeded
    deadline timestamptz, -- the step's own, over all attempts
    schedule_deadline timestamptz, -- longest wait for a capable executor
    revision bigint not null,
    primary key (route_id, available_at, step_run_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
create index ready_deadline on rara.ready (least(deadline, schedule_deadline))
    where deadline is not null or schedule_deadline is not null; -- overdue_ready

-- Due later: backoff does not stand among the ready.
create table rara.waiting (
    step_run_id uuid primary key,
    workflow_run_id uuid not null,
    route_id int not null,
    available_at timestamptz not null,
    attempt int not null check (attempt >= 1),
    failures int not null check (failures between 0 and attempt),
    free_endings int not null default 0 check (free_endings >= 0),
    reason text not null,
    released_at timestamptz not null,
    deadline timestamptz,
    revision bigint not null
);
create index waiting_due on rara.waiting (available_at); -- promote_waiting
create index waiting_deadline on rara.waiting (deadline) where deadline is not null; -- overdue_waiting

-- One row per current lease. No index on what a renewal changes, and room on the page: updates stay HOT.
create table rara.lease (
    step_run_id uuid primary key,
    workflow_run_id uuid not null,
    route_id int not null,
    lease_token bigint not null check (lease_token > 0),
    attempt int not null check (attempt >= 1),
    failures int not null check (failures between 0 and attempt - 1),
    free_endings int not null check (free_endings >= 0),
    executor_id uuid not null,
    released_at timestamptz not null,
    deadline timestamptz,
    granted_at timestamptz not null,
    granted_on date not null, -- UTC day of the grant: the partition of this attempt's history
    expires_at timestamptz not null check (expires_at > granted_at),
    accepted_at timestamptz,
    started_at timestamptz, -- null: leased; else running
    attempt_deadline timestamptz, -- from attempt_timeout, counted from started_at
    progress_timeout interval, -- longest silence while running
    progress_at timestamptz, -- when it last moved
    last_sequence bigint not null default 0 check (last_sequence >= 0),
    gaps int not null default 0 check (gaps >= 0), -- sequence numbers below last_sequence that never came
    cancel_requested_at timestamptz,
    cancel_reason text,
    cancel_grace interval,
    cancel_delivered_at timestamptz,
    revision bigint not null,
    check (started_at is null or accepted_at is not null),
    check ((cancel_requested_at is null) = (cancel_reason is null)),
    check ((cancel_requested_at is null) = (cancel_grace is null))
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- One row per closed step. The primary key makes a second commit impossible.
create table rara.result (
    step_run_id uuid primary key,
    workflow_run_id uuid not null,
    state text not null check (state in ('succeeded', 'terminal_failed', 'cancelled')),
    reason text not null, -- empty: succeeded
    revision bigint not null,
    attempt int not null check (attempt >= 0),
    failures int not null check (failures >= 0),
    -- The attempt that closed the step; null where the step was waiting and the database alone closed it.
    lease_token bigint,
    executor_id uuid,
    granted_at timestamptz,
    granted_on date,
    accepted_at timestamptz,
    started_at timestamptz,
    last_sequence bigint not null default 0,
    gaps int not null default 0,
    spent boolean not null default false, -- this attempt counts in failures
    cancel_requested_at timestamptz,
    cancel_reason text,
    cancel_delivered_at timestamptz,
    cancel_confirmed_at timestamptz, -- null: closed without the executor's word
    released_at timestamptz,
    deadline timestamptz,
    output bytea, -- JSON; only with succeeded
    error jsonb, -- the last error
    ended_at timestamptz not null,
    check ((state = 'succeeded') = (reason = '')),
    check (state <> 'succeeded' or (lease_token is not null and started_at is not null)),
    check (output is null or state = 'succeeded'),
    check ((lease_token is null) = (granted_on is null))
);
create index result_run on rara.result (workflow_run_id, revision); -- changed_steps

-- ---------------------------------------------------------------- history: append-only, by day of the grant

create table rara.step_attempt ( -- attempts that ended and left the step open; the last one is in `result`
    granted_on date not null,
    step_run_id uuid not null,
    attempt int not null,
    lease_token bigint not null,
    executor_id uuid not null,
    reason text not null,
    spent boolean not null,
    error jsonb,
    last_sequence bigint not null,
    gaps int not null,
    granted_at timestamptz not null,
    accepted_at timestamptz,
    started_at timestamptz,
    ended_at timestamptz not null,
    cancel_requested_at timestamptz,
    cancel_reason text,
    primary key (granted_on, step_run_id, attempt)
) partition by range (granted_on);
create table rara.step_attempt_default partition of rara.step_attempt default;
create index step_attempt_step on rara.step_attempt (step_run_id, attempt); -- get_step_attempts

create table rara.step_event (
    granted_on date not null,
    step_run_id uuid not null,
    attempt int not null,
    sequence bigint not null check (sequence >= 1),
    type text not null
        check (type in ('accepted', 'running', 'progress', 'effect', 'succeeded', 'failed', 'cancelled')),
    -- rara.v1.ProgressEvent without its lease, inline bytes and payloads over 4 KiB
    body bytea not null,
    stored_at timestamptz not null default now(),
    primary key (granted_on, step_run_id, attempt, sequence)
) partition by range (granted_on);
create table rara.step_event_default partition of rara.step_event default;

-- Creates the partitions of today and of $1 days ahead (UTC) that are missing; returns their names. A day whose rows
-- are in the default partition already keeps them there.
create function rara.create_history_partitions(days_ahead int) returns setof text language plpgsql as $$
declare
    day date;
    parent text;
    name text;
begin
    if not pg_try_advisory_xact_lock(hashtext('rara.create_history_partitions')) then
        return; -- another scheduler is at it
    end if;
    for offset_days in 0 .. days_ahead loop
        day := (now() at time zone 'UTC')::date + offset_days;
        foreach parent in array array['step_attempt', 'step_event'] loop
            name := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
            continue when to_regclass(format('rara.%I', name)) is not null;
            begin
                execute format('create table rara.%I partition of rara.%I for values from (%L) to (%L)',
                               name, parent, day, day + 1);
                return next name;
            exception when check_violation then
                null;
            end;
        end loop;
    end loop;
end
$$;

-- ---------------------------------------------------------------- what crosses attempts

create table rara.effect ( -- what once() recorded; the first of a name stays
    idempotency_key text not null,
    name text not null,
    result bytea not null,
    step_run_id uuid not null,
    attempt int not null,
    lease_token bigint not null,
    recorded_at timestamptz not null default now(),
    primary key (idempotency_key, name)
);

create table rara.checkpoint ( -- the newest per idempotency key
    idempotency_key text primary key,
    step_run_id uuid not null,
    attempt int not null,
    lease_token bigint not null,
    sequence bigint not null,
    data bytea not null,
    stored_at timestamptz not null default now()
) with (fillfactor = 50);

-- ---------------------------------------------------------------- artifacts and lineage

create table rara.blob (
    sha256 text primary key check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null check (size_bytes >= 0),
    created_at timestamptz not null default now(),
    verified_at timestamptz not null default now(), -- the bytes were read and hashed by us
    marked_at timestamptz -- marked for deletion: counts as missing
);

create table rara.upload (
    upload_id uuid primary key,
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null check (size_bytes >= 0),
    step_run_id uuid, -- null: a client's, for the input of a run
    lease_token bigint,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);
create index upload_sha256 on rara.upload (sha256);

create table rara.artifact ( -- manifests; those of attempt = result.attempt of a succeeded step are its output
    step_run_id uuid not null references rara.step_run,
    attempt int not null,
    name text not null,
    position int not null,
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null check (size_bytes >= 0),
    media_type text not null,
    type text not null,
    inline bytea, -- small ones carry their bytes; null: in the blob store
    metadata bytea,
    lease_token bigint not null,
    created_at timestamptz not null default now(),
    primary key (step_run_id, attempt, name)
);
create index artifact_sha256 on rara.artifact (sha256);

create table rara.lineage (
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint not null,
    step_run_id uuid not null references rara.step_run,
    workflow_run_id uuid not null,
    attempt int not null,
    produced boolean not null, -- else consumed
    declared boolean not null, -- else seen at run time only
    name text not null,
    derived_from text[] not null default '{}', -- digests; empty: from all inputs of the step
    primary key (sha256, step_run_id, attempt, produced, name)
);
create index lineage_step on rara.lineage (step_run_id, produced);
create index lineage_run on rara.lineage (workflow_run_id);

-- ---------------------------------------------------------------- executors

-- What is connected, for people, for `explain` and for the other schedulers. Leases do not depend on it.
create table rara.executor (
    executor_id uuid primary key,
    executor_name text not null,
    executor_kind text not null,
    sdk text not null,
    capabilities jsonb not null, -- [{"kind", "versions", "max_concurrency", "input_schema_sha256"}]
    labels jsonb not null,
    session_id uuid not null, -- the newest session; an older one on any scheduler gives way
    scheduler_id uuid not null,
    direct boolean not null default false,
    draining boolean not null default false,
    in_flight int not null default 0,
    free_credit int not null default 0,
    connected_at timestamptz not null default now(),
    last_seen_at timestamptz not null default now(),
    ended_at timestamptz -- the session ended; null: connected
) with (fillfactor = 70);
create index executor_seen on rara.executor (last_seen_at);

-- ---------------------------------------------------------------- what the database refuses by itself

create function rara.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'a row of rara.% is final: % refused', tg_table_name, lower(tg_op)
        using errcode = 'restrict_violation';
end
$$;

create trigger definition_is_final before update or delete on rara.definition
    for each row execute function rara.refuse_change();
create trigger step_run_is_final before update or delete on rara.step_run
    for each row execute function rara.refuse_change();
create trigger result_is_final before update or delete on rara.result
    for each row execute function rara.refuse_change();
create trigger closed_run_is_final before update on rara.workflow_run
    for each row when (old.state in ('succeeded', 'failed', 'cancelled'))
    execute function rara.refuse_change();
create trigger run_is_kept before delete on rara.workflow_run
    for each row execute function rara.refuse_change();
create trigger step_event_is_final before update on rara.step_event
    for each row execute function rara.refuse_change();
create trigger step_attempt_is_final before update on rara.step_attempt
    for each row execute function rara.refuse_change();

-- A closed step has no place among the live, and the live are not closed.
create function rara.refuse_closed_step() returns trigger language plpgsql as $$
begin
    if exists (select from rara.result r where r.step_run_id = new.step_run_id) then
        raise exception 'step % is closed', new.step_run_id using errcode = 'restrict_violation';
    end if;
    return new;
end
$$;
create trigger waiting_is_open before insert on rara.waiting
    for each row execute function rara.refuse_closed_step();

select rara.create_history_partitions(3);

-- ---------------------------------------------------------------- where a step stands

create view rara.step_state as
select s.step_run_id,
       s.workflow_run_id,
       s.step_name,
       s.route_id,
       case when x.step_run_id is not null then x.state
            when l.step_run_id is not null then case when l.started_at is null then 'leased' else 'running' end
            when w.step_run_id is not null then 'retryable_failed'
            when r.step_run_id is not null and r.attempt > 0 then 'retryable_failed'
            else 'pending'
       end as state,
       coalesce(x.reason, w.reason, r.reason, '') as reason,
       coalesce(x.attempt, l.attempt, w.attempt, r.attempt, 0) as attempt,
       coalesce(x.failures, l.failures, w.failures, r.failures, 0) as failures,
       coalesce(x.revision, l.revision, w.revision, r.revision, 1) as revision,
       coalesce(x.lease_token, l.lease_token) as lease_token,
       coalesce(x.executor_id, l.executor_id) as executor_id,
       coalesce(x.granted_on, l.granted_on) as granted_on,
       coalesce(x.granted_at, l.granted_at) as granted_at,
       coalesce(x.accepted_at, l.accepted_at) as accepted_at,
       coalesce(x.started_at, l.started_at) as started_at,
       coalesce(x.last_sequence, l.last_sequence, 0) as last_sequence,
       coalesce(x.gaps, l.gaps, 0) as gaps,
       coalesce(x.cancel_requested_at, l.cancel_requested_at) as cancel_requested_at,
       coalesce(x.cancel_reason, l.cancel_reason) as cancel_reason,
       coalesce(x.cancel_delivered_at, l.cancel_delivered_at) as cancel_delivered_at,
       x.cancel_confirmed_at,
       coalesce(w.available_at, r.available_at) as available_at,
       l.expires_at as lease_expires_at,
       coalesce(x.released_at, l.released_at, w.released_at, r.released_at) as released_at,
       coalesce(x.deadline, l.deadline, w.deadline, r.deadline) as deadline,
       l.progress_at,
       x.output,
       x.error,
       x.spent,
       x.ended_at
  from rara.step_run s
  left join rara.result x on x.step_run_id = s.step_run_id
  left join rara.lease l on l.step_run_id = s.step_run_id
  left join rara.waiting w on w.step_run_id = s.step_run_id
  left join rara.ready r on r.step_run_id = s.step_run_id;

-- migrate:down

drop schema rara cascade;
