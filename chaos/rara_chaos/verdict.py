"""Holds what is stored, and what the handlers wrote down, against the promises."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from rara_scheduler.blobs import FolderBlobStore
from rara_scheduler.store.check import Violation, check, check_blob_bytes

from rara_chaos import ledger
from rara_chaos.ledger import Entry, What
from rara_chaos.load import Confirmed

# Between the instant that a line carries and the moment it stands for, on a machine that is busy.
_CLOCK_S = 0.05
_THAW_S = 0.5  # after a thaw, until it has fenced what it holds
_CLOCK_CALLS = 20
_OVERDUE_S = 10.0  # the stack has been quiet: what is due has been served
OURS = "definition like 'chaos-%'"  # runs of the load, where there are others

Connection = asyncpg.Connection


@dataclass(slots=True)
class Attempt:
    """One grant, from the database. Instants are wall time."""

    step_run_id: str
    attempt: int
    token: int
    executor: str
    executor_kind: str
    reason: str
    granted_at: float
    accepted_at: float | None
    started_at: float | None
    ended_at: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long a step whose executor was killed waited until it ran again."""

    seconds: float
    step_run_id: str = ""
    executor: str = ""
    killed_at: float = 0.0  # wall time


@dataclass(slots=True)
class Verdict:
    """violations, lost, stranded: each names what it is about."""

    violations: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stranded: list[str] = field(default_factory=list)
    runs: int = 0
    steps: int = 0
    attempts: int = 0
    effects: int = 0
    effects_repeated: int = 0  # by a crash between doing and recording: allowed, and worth knowing
    longest_recovery: Recovery = Recovery(0.0)
    reasons: dict[str, int] = field(default_factory=dict)
    attempts_by_kind: dict[str, int] = field(default_factory=dict)  # of executors
    artifacts: int = 0  # in manifests, with their bytes in the blob store
    blobs_verified: int = 0  # read, and held against their digests
    removed: int = 0  # blobs, by collections under way
    handovers: int = 0  # from a step to one after it that another kind of executor ran

    @property
    def is_clean(self) -> bool:
        return not (self.violations or self.lost or self.stranded)


@dataclass(slots=True)
class Activity:
    """What one attempt wrote down."""

    first_s: float
    last_s: float
    starts: int = 0
    effects: int = 0


async def judge(
    dsn: str,
    ledger_path: Path,
    blob_folder: Path | None,
    confirmed: Sequence[Confirmed],
    kills: Mapping[str, Sequence[float]],
    *,
    is_other_clock: bool = False,
    frozen: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """Read everything; the stack is quiet.

    blob_folder: None where somebody else looks at the blobs. kills: of executors, by name, in wall time.
    is_other_clock: the database is another machine's. frozen: executors as a whole, from and to, monotonic.
    """
    verdict = Verdict()
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await _judge_runs(connection, confirmed, verdict)
            await _judge_open(connection, verdict)
            by_key = activities(ledger.read(ledger_path), frozen)
            await _judge_ledger(connection, by_key, verdict)
            await _judge_kinds(connection, verdict)
            attempts = await read_attempts(connection)
        wall_s = await _other_clock(connection) if is_other_clock else time.time() - time.monotonic()
        report = await check(connection, overdue_s=_OVERDUE_S)
        blobs = await _judge_blobs(connection, blob_folder, verdict)
        for found in (*report.violations, *blobs):
            verdict.violations.append(
                f"{found.rule}: {found.workflow_run_id} {found.step_run_id} {found.facts}"
            )
    finally:
        await connection.close()
    by_token = {token: one for tokens in by_key.values() for token, one in tokens.items()}
    verdict.violations += out_of_bounds(attempts, by_token, wall_s)
    verdict.attempts = len(attempts)
    for attempt in attempts:
        reason = attempt.reason or "SUCCEEDED"
        verdict.reasons[reason] = verdict.reasons.get(reason, 0) + 1
        kind = attempt.executor_kind
        verdict.attempts_by_kind[kind] = verdict.attempts_by_kind.get(kind, 0) + 1
    recovered = recoveries(attempts, kills)
    verdict.longest_recovery = max(recovered, key=lambda one: one.seconds, default=Recovery(0.0))
    return verdict


async def _other_clock(connection: Connection) -> float:
    """What the database's wall clock is ahead of our monotonic one: by the shortest of some calls."""
    found = []
    for _ in range(_CLOCK_CALLS):
        asked_s = time.monotonic()
        now_s = float(await connection.fetchval("select extract(epoch from clock_timestamp())"))
        answered_s = time.monotonic()
        found.append((answered_s - asked_s, now_s - (asked_s + answered_s) / 2))
    return min(found)[1]


async def _judge_blobs(
    connection: Connection, folder: Path | None, verdict: Verdict
) -> tuple[Violation, ...]:
    """Every blob that counts, and with it every manifest's, is there to the last byte."""
    verdict.artifacts = await connection.fetchval("select count(*) from rara.artifact where inline is null")
    if folder is None:
        return ()
    store = FolderBlobStore(folder)
    try:
        report = await check_blob_bytes(connection, store)
    finally:
        store.close()
    verdict.blobs_verified = report.looked_at
    return report.finding.violations


async def _judge_runs(connection: Connection, confirmed: Iterable[Confirmed], verdict: Verdict) -> None:
    """Each run that was answered is there, has ended, and gave what its handlers compute."""
    rows = await connection.fetch(
        f"select workflow_run_id::text, state, cancel_reason, ended_at from rara.workflow_run where {OURS}"  # noqa: S608
    )
    stored = {row["workflow_run_id"]: row for row in rows}
    verdict.runs = len(stored)
    outputs = await _outputs(connection)
    for run in confirmed:
        row = stored.get(run.workflow_run_id)
        if row is None:
            verdict.lost.append(f"run {run.workflow_run_id}")
        elif row["ended_at"] is not None:
            verdict.violations += wrong_end(run, row["state"], row["cancel_reason"], stored)
            verdict.violations += wrong_values(run, outputs.get(run.workflow_run_id, {}))
    for row in rows:
        if row["ended_at"] is None:
            verdict.stranded.append(f"run {row['workflow_run_id']} is {row['state']}")


def wrong_end(run: Confirmed, state: str, cancel_reason: str | None, stored: Mapping[str, Any]) -> list[str]:
    expected = {"succeeded"}
    if run.shape.fails:
        expected = {"failed"}
    if run.retry_of is not None:
        # Where the first run was cancelled, the hopeless step may not have met its run yet.
        met = stored[run.retry_of]["state"] == "failed" if run.retry_of in stored else False
        expected = {"succeeded"} if met or not run.shape.fails else {"succeeded", "failed"}
    if run.may_be_cancelled:
        expected |= {"cancelled", "failed"}
    if state in expected:
        return []
    return [
        f"run {run.workflow_run_id} of {run.shape.name} is {state} ({cancel_reason}), not {sorted(expected)}"
    ]


async def _outputs(connection: Connection) -> dict[str, dict[str, Any]]:
    """What each step of each run gave, taken by reference too."""
    rows = await connection.fetch(
        "select w.run::text, s.step_name, x.output from rara.result x join rara.step_run s using (step_run_id)"
        " cross join lateral (select s.workflow_run_id as run union all"
        " select r.workflow_run_id from rara.reused_step r where r.step_run_id = s.step_run_id) w"
        " join rara.route q using (route_id) where x.state = 'succeeded' and q.kind like 'chaos.%'"
    )
    outputs: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        outputs[row["run"]][row["step_name"]] = orjson.loads(row["output"])
    return outputs


def wrong_values(run: Confirmed, outputs: Mapping[str, Any]) -> list[str]:
    values = run.shape.values(run.number)
    return [
        f"run {run.workflow_run_id} of {run.shape.name}: step {name} gave {output}, not {values[name]}"
        for name, output in outputs.items()
        if output.get("value") != values[name]
    ]


async def _judge_open(connection: Connection, verdict: Verdict) -> None:
    """No step stands anywhere any more."""
    ours = f"join rara.workflow_run w using (workflow_run_id) where {OURS}"
    verdict.steps = await connection.fetchval(f"select count(*) from rara.result {ours}")  # noqa: S608
    for row in await connection.fetch(
        f"select s.step_run_id::text, s.state from rara.step_state s {ours} and s.ended_at is null order by 1"  # noqa: S608
    ):
        verdict.stranded.append(f"step {row['step_run_id']} is {row['state']}")


async def _judge_ledger(
    connection: Connection, by_key: Mapping[str, Mapping[int, Activity]], verdict: Verdict
) -> None:
    recorded = {
        row["idempotency_key"]: row["lease_token"]
        for row in await connection.fetch(
            "select idempotency_key, lease_token from rara.effect where name = 'charge'"
        )
    }
    for key, attempts in by_key.items():
        verdict.violations += overlaps(key, attempts) + wrong_effects(key, attempts, recorded.get(key))
        done = sum(activity.effects for activity in attempts.values())
        verdict.effects += min(done, 1)
        verdict.effects_repeated += max(done - 1, 0)
    verdict.violations += await _wrong_charges(connection, recorded)


def activities(
    entries: Iterable[Entry], frozen: Sequence[tuple[float, float]] = ()
) -> dict[str, dict[int, Activity]]:
    """By idempotency key and lease token.

    Where a whole executor was frozen, its handlers and its warden go on together, and a handler may write a last word
    before it is fenced: that is taken for one of before.
    """
    by_key: dict[str, dict[int, Activity]] = defaultdict(dict)
    for entry in entries:
        activity = by_key[entry.key].setdefault(entry.token, Activity(entry.at_s, entry.at_s))
        if not any(began_s < entry.at_s < ended_s + _THAW_S for began_s, ended_s in frozen):
            activity.last_s = max(activity.last_s, entry.at_s)
        activity.starts += entry.what is What.START
        activity.effects += entry.what is What.EFFECT
    return by_key


def overlaps(key: str, attempts: Mapping[int, Activity]) -> list[str]:
    """An attempt has ended before the next one of the same work begins, and begins once."""
    found = [
        f"{key}: the handler of token {token} was started {activity.starts} times"
        for token, activity in attempts.items()
        if activity.starts != 1
    ]
    latest: tuple[int, float] | None = None
    for token, activity in sorted(attempts.items()):
        if latest is not None and latest[1] > activity.first_s + _CLOCK_S:
            late_s = latest[1] - activity.first_s
            found.append(f"{key}: token {latest[0]} was at work {late_s:.2f} s after token {token} had begun")
        if latest is None or activity.last_s > latest[1]:
            latest = token, activity.last_s
    return found


def out_of_bounds(attempts: Iterable[Attempt], by_token: Mapping[int, Activity], wall_s: float) -> list[str]:
    """A handler is at work only between `accepted` and the end of its attempt, as stored.

    wall_s: what has to be added to the ledger's instants to make them wall time.
    """
    found = []
    known = {attempt.token: attempt for attempt in attempts}
    for token, activity in by_token.items():
        attempt = known.get(token)
        if attempt is None or attempt.accepted_at is None:
            found.append(f"token {token} was at work and never accepted")
        elif activity.first_s + wall_s < attempt.accepted_at - _CLOCK_S:
            early_s = attempt.accepted_at - activity.first_s - wall_s
            found.append(f"{attempt.step_run_id}: token {token} began {early_s:.2f} s before it was accepted")
        elif activity.last_s + wall_s > attempt.ended_at + _CLOCK_S:
            late_s = activity.last_s + wall_s - attempt.ended_at
            why = attempt.reason or "success"
            found.append(
                f"{attempt.step_run_id}: token {token} worked on {late_s:.2f} s after its end ({why})"
            )
    return found


def wrong_effects(key: str, attempts: Mapping[int, Activity], recorded: int | None) -> list[str]:
    """What was recorded was done, once by its attempt, and by none after it."""
    found = [
        f"{key}: token {token} did the effect {activity.effects} times"
        for token, activity in attempts.items()
        if activity.effects > 1
    ]
    if recorded is None:
        return found
    if recorded not in attempts or not attempts[recorded].effects:
        found.append(f"{key}: the recorded effect of token {recorded} was never done")
    return found + [
        f"{key}: token {token} did the effect again that token {recorded} had recorded"
        for token, activity in attempts.items()
        if token > recorded and activity.effects
    ]


async def _wrong_charges(connection: Connection, recorded: Mapping[str, int]) -> list[str]:
    """Every success was given the effect that is recorded."""
    found = []
    for row in await connection.fetch(
        "select s.idempotency_key, x.output from rara.result x join rara.step_run s using (step_run_id)"
        " join rara.route q using (route_id) where x.state = 'succeeded' and q.kind like 'chaos.%'"
    ):
        token = orjson.loads(row["output"])["charge"]["token"]
        if recorded.get(row["idempotency_key"]) != token:
            kept = recorded.get(row["idempotency_key"])
            found.append(
                f"{row['idempotency_key']}: succeeded with the effect of {token}, recorded is {kept}"
            )
    return found


async def _judge_kinds(connection: Connection, verdict: Verdict) -> None:
    """Every attempt was granted to a kind of executor that its step asks for."""
    for row in await connection.fetch(
        "select a.lease_token, s.step_run_id::text, e.executor_kind as ran, q.executor_kind as asked from ("
        " select step_run_id, lease_token, executor_id from rara.step_attempt"
        " union all select step_run_id, lease_token, executor_id from rara.result where lease_token is not null"
        ") a join rara.executor e using (executor_id) join rara.step_run s using (step_run_id)"
        " join rara.route q using (route_id) where q.executor_kind not in ('', e.executor_kind)"
    ):
        verdict.violations.append(
            f"{row['step_run_id']}: token {row['lease_token']} was granted to a {row['ran']} executor,"
            f" asked for is {row['asked']}"
        )
    verdict.handovers = await connection.fetchval(
        "select count(*) from rara.step_dependency d"
        " join rara.result a on a.step_run_id = d.depends_on_step_run_id"
        " join rara.result b on b.step_run_id = d.step_run_id"
        " join rara.executor x on x.executor_id = a.executor_id"
        " join rara.executor y on y.executor_id = b.executor_id"
        " where a.state = 'succeeded' and b.state = 'succeeded' and x.executor_kind <> y.executor_kind"
    )


async def read_attempts(connection: Connection) -> list[Attempt]:
    """Every grant that has ended, in the order of steps and attempts."""
    rows = await connection.fetch(
        "select a.*, coalesce(e.executor_name, '') as executor, coalesce(e.executor_kind, '') as executor_kind"
        " from ("
        " select step_run_id, attempt, lease_token, executor_id, reason, granted_at, accepted_at, started_at, ended_at"
        " from rara.step_attempt"
        " union all"
        " select step_run_id, attempt, lease_token, executor_id, reason, granted_at, accepted_at, started_at, ended_at"
        " from rara.result where lease_token is not null"
        ") a left join rara.executor e using (executor_id) order by a.step_run_id, a.attempt"
    )
    return [
        Attempt(
            str(row["step_run_id"]),
            row["attempt"],
            row["lease_token"],
            row["executor"],
            row["executor_kind"],
            row["reason"],
            row["granted_at"].timestamp(),
            row["accepted_at"] and row["accepted_at"].timestamp(),
            row["started_at"] and row["started_at"].timestamp(),
            row["ended_at"].timestamp(),
        )
        for row in rows
    ]


def recoveries(attempts: Sequence[Attempt], kills: Mapping[str, Sequence[float]]) -> list[Recovery]:
    """From each SIGKILL of an executor to the next attempt's `running`, for each step that it ran."""
    found = []
    for index, attempt in enumerate(attempts):
        if attempt.started_at is None or attempt.reason != "LEASE_EXPIRED":
            continue
        for killed_at in kills.get(attempt.executor, ()):
            if not attempt.started_at < killed_at < attempt.ended_at:
                continue
            following = (
                later.started_at
                for later in attempts[index + 1 :]
                if later.step_run_id == attempt.step_run_id and later.started_at is not None
            )
            if (started_at := next(following, None)) is not None:
                found.append(
                    Recovery(started_at - killed_at, attempt.step_run_id, attempt.executor, killed_at)
                )
    return found
