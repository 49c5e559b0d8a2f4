"""The history checker: every promise that stored history can show to be broken, as one rule and one query.

    report = await check(connection)
    assert report.is_clean, report.counts

SQL does the work, in one read-only snapshot, so that the answer is right on a live database and memory is bounded
by `limit`, however long the history.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol

import asyncpg
import orjson
from google.protobuf.message import DecodeError
from rara.v1 import workflow_pb2

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.store.database import Connection
from rara_scheduler.store.queries import query

DEFAULT_LIMIT = 20


class Needs(Enum):
    """What a rule's query asks for besides the limit."""

    NOTHING = auto()
    BUDGETS = auto()  # max_attempts by definition, version and step
    OVERDUE = auto()  # seconds after which recovery is too late; without them the rule is left out


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold. The query of each in RULES is `check_<name>`."""

    name: str
    promise: str
    needs: Needs = Needs.NOTHING


@dataclass(frozen=True, slots=True)
class Violation:
    """Where a rule is broken. Ids are empty where the rule is about none; facts: as JSON has them."""

    rule: str
    workflow_run_id: str
    step_run_id: str
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found. violations: the first of `total`."""

    rule: Rule
    total: int
    violations: tuple[Violation, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Violations by rule, of every rule that was asked."""
        return {finding.rule.name: finding.total for finding in self.findings}

    @property
    def broken(self) -> dict[str, int]:
        """Violations by rule, of those that found any."""
        return {name: total for name, total in self.counts.items() if total}

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Those that are listed: of each rule the first ones."""
        return tuple(violation for finding in self.findings for violation in finding.violations)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def is_clean(self) -> bool:
        return self.total == 0


RULES: tuple[Rule, ...] = (
    # One owner finishes.
    Rule("step_in_two_places", "an open step stands in one place: ready, waiting or leased"),
    Rule("step_nowhere", "a step whose dependencies have succeeded is leasable, leased or closed"),
    Rule("step_blocked_for_ever", "a step that cannot begin any more is closed"),
    Rule("row_of_unknown_step", "every lease, wait and result belongs to a step of its run and route"),
    Rule("token_granted_twice", "a lease token is granted once"),
    Rule("token_went_back", "lease tokens rise with the attempts of a step"),
    Rule("token_beyond_sequence", "the next token is above all that were granted"),
    Rule("two_commits", "an attempt ends once, and a step has one result"),
    Rule("lease_without_end", "every lease has an owner, a token and an expiry"),
    # Terminal is final.
    Rule("left_terminal_state", "a closed step is neither leased nor leasable"),
    Rule("run_changed_after_close", "a closed run does not change, and closes once"),
    Rule("guard_missing", "the database refuses changes to what is closed"),
    # Attempts and the budget.
    Rule("attempt_missing", "attempts count from 1 without a hole"),
    Rule("failures_miscounted", "failures count the attempts that spent the budget"),
    Rule("budget_misjudged", "an attempt spends the budget as its code says"),
    Rule("budget_overrun", "no step fails more often than its max_attempts", Needs.BUDGETS),
    # Events are stored in order, once.
    Rule("event_of_unknown_attempt", "an event belongs to an attempt that was granted"),
    Rule("event_count", "sequence numbers that never came are counted as gaps"),
    Rule("event_after_terminal", "nothing follows an attempt's terminal event"),
    Rule("two_terminal_events", "an attempt has one terminal event at most"),
    Rule("outcome_disagrees", "an attempt ended as its executor's last event says"),
    Rule("marks_without_events", "accepted and started are what stored events show"),
    # A run closes once, in the transaction of its last step.
    Rule("run_counters", "a run's counters are its steps' results"),
    Rule("run_total", "a run has all of its steps"),
    Rule("run_closed_early", "a closed run has no open step"),
    Rule("run_closed_late", "a run whose steps are all closed is closed"),
    Rule("run_wrong_end", "a run ends in the state that its steps give"),
    Rule("failed_step_wrong", "a failed run names a step that failed it"),
    Rule("run_state_behind", "a run is running when a lease of it was accepted"),
    Rule("revision_ahead", "every change of a step raises its run's revision"),
    # Cancel.
    Rule("wait_after_cancel", "nothing waits for a lease once the run's cancel is stored"),
    Rule("lease_not_asked_to_stop", "a stored cancel asks every lease of the run to end"),
    Rule("run_not_cancelling", "a run is cancelling while a stored cancel is being confirmed"),
    Rule("granted_after_cancel", "no lease is granted after the run's cancel was stored"),
    Rule("cancelled_without_cause", "a step is cancelled for a request or a failure that is stored"),
    # Dependencies and retries.
    Rule("released_early", "a step begins when all of its dependencies have succeeded"),
    Rule("dependency_unknown", "a step depends on steps of its run, or on those taken by reference"),
    Rule("reused_without_success", "a retried run takes over nothing but successes"),
    Rule("retry_of_open_run", "a closed run has one live retry at most"),
    # Artifacts and lineage.
    Rule("manifest_without_blob", "every artifact's blob is stored with its size"),
    Rule("inline_mismatch", "inline bytes have the digest and size of their artifact"),
    Rule("manifest_of_unknown_token", "a manifest belongs to an attempt that has ended"),
    Rule("lineage_without_artifact", "lineage names artifacts of steps that succeeded"),
    Rule("manifest_without_lineage", "every artifact of a step that succeeded has lineage"),
    # Effects and checkpoints.
    Rule("effect_twice", "an effect is recorded once for its key and name"),
    Rule("effect_of_unknown_token", "an effect was recorded under a token and key of its step"),
    Rule("checkpoint_of_unknown_token", "a checkpoint was stored under a token and key of its step"),
    Rule("checkpoint_without_blob", "every blob that a checkpoint needs is stored with its size"),
    Rule("checkpoint_of_two_tokens", "a checkpoint's artifacts came in the event that brought it"),
    Rule("key_of_two_steps", "an idempotency key belongs to one step and its retries"),
    # Recovery.
    Rule("lease_not_reclaimed", "a lease that has expired is reclaimed", Needs.OVERDUE),
    Rule("wait_not_ended", "a step whose backoff is over becomes leasable", Needs.OVERDUE),
    Rule("deadline_not_kept", "a deadline closes what it belongs to", Needs.OVERDUE),
)

BLOB_BYTES = Rule("blob_bytes", "every blob that counts is stored, with the size and digest of its name")
_BLOB_PAGE = 500
_BLOBS_AT_ONCE = 8


class Depth(StrEnum):
    """How closely stored bytes are looked at."""

    SIZE = "size"  # that they are there, unread
    DIGEST = "digest"  # every byte


class StoredBytes(Protocol):
    """What this needs of a blob store."""

    async def size(self, sha256: str) -> int | None: ...

    async def verify(self, expected: BlobDigest) -> bool: ...


@dataclass(frozen=True, slots=True)
class BlobReport:
    """looked_at: blobs whose bytes were held against their row."""

    finding: Finding
    looked_at: int


async def check(
    connection: "Connection | asyncpg.Connection[asyncpg.Record]",
    *,
    limit: int = DEFAULT_LIMIT,
    overdue_s: float | None = None,
    max_attempts: int | None = None,
    statement_timeout_s: float = 600.0,
) -> Report:
    """Hold stored history against every rule. The connection must be in no transaction, and nothing is changed.

    limit: violations listed of each rule; all are counted.
    overdue_s: how late a sweep may be; None leaves the rules of recovery out, since a live system has what is due.
    max_attempts: of steps whose definition does not say; None leaves such steps out.
    """
    findings = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute(query("check_settings"), str(int(statement_timeout_s * 1000)))
        arguments: dict[Needs, Sequence[object]] = {
            Needs.NOTHING: (),
            Needs.BUDGETS: await _budgets(connection, max_attempts),
            Needs.OVERDUE: (overdue_s,),
        }
        for rule in RULES:
            if rule.needs is Needs.OVERDUE and overdue_s is None:
                continue
            began = time.monotonic()
            rows = await connection.fetch(query(f"check_{rule.name}"), limit, *arguments[rule.needs])
            findings.append(_finding(rule, rows, time.monotonic() - began))
    return Report(tuple(findings))


def _finding(rule: Rule, rows: Sequence[asyncpg.Record], took_s: float) -> Finding:
    violations = tuple(
        Violation(
            rule.name, row["workflow_run_id"] or "", row["step_run_id"] or "", orjson.loads(row["facts"])
        )
        for row in rows
    )
    return Finding(rule, rows[0]["total"] if rows else 0, violations, took_s)


async def _budgets(
    connection: "Connection | asyncpg.Connection[asyncpg.Record]", default: int | None
) -> Sequence[object]:
    """max_attempts in four columns: definition, version, step, budget."""
    budgets = []
    async for row in connection.cursor(query("check_definitions")):
        try:
            definition = workflow_pb2.Definition.FromString(row["body"])
        except DecodeError:
            continue  # its runs are held against all the other rules
        for step in definition.steps:
            budget = step.retry.max_attempts or default
            if budget is not None:
                budgets.append((row["definition"], row["version"], step.step_name, budget))
    return [list(column) for column in zip(*budgets, strict=True)] or [[], [], [], []]


async def check_blob_bytes(
    connection: "Connection | asyncpg.Connection[asyncpg.Record]",
    store: StoredBytes,
    *,
    depth: Depth = Depth.DIGEST,
    limit: int = DEFAULT_LIMIT,
) -> BlobReport:
    """Hold the bytes of every blob that counts against its row. Bytes without a row are no violation.

    In short transactions, since the reading may take hours; a blob that went meanwhile is none of its business.
    """
    began = time.monotonic()
    found: list[Violation] = []
    total, looked_at, after = 0, 0, ""
    slots = asyncio.Semaphore(_BLOBS_AT_ONCE)

    async def look(blob: BlobDigest) -> dict[str, object] | None:
        async with slots:
            return await _damage(store, blob, depth)

    while page := await connection.fetch(query("check_blobs"), after, _BLOB_PAGE):
        blobs = [BlobDigest(row["sha256"], row["size_bytes"]) for row in page]
        after = blobs[-1].sha256
        looked_at += len(blobs)
        for blob, damage in zip(blobs, await asyncio.gather(*map(look, blobs)), strict=True):
            if damage is None or await connection.fetchval(query("get_blob"), blob.sha256) is None:
                continue
            total += 1
            if total <= limit:
                user = await connection.fetchrow(query("check_blob_user"), blob.sha256)
                facts = {"sha256": blob.sha256, "size_bytes": blob.size_bytes} | damage
                found.append(
                    Violation(
                        BLOB_BYTES.name,
                        (user and user["workflow_run_id"]) or "",
                        (user and user["step_run_id"]) or "",
                        facts,
                    )
                )
    return BlobReport(Finding(BLOB_BYTES, total, tuple(found), time.monotonic() - began), looked_at)


async def _damage(store: StoredBytes, blob: BlobDigest, depth: Depth) -> dict[str, object] | None:
    """What is wrong with a blob's bytes; None: nothing."""
    stored_bytes = await store.size(blob.sha256)
    if stored_bytes is None:
        return {"problem": "missing"}
    if stored_bytes != blob.size_bytes:
        return {"problem": "size", "stored_bytes": stored_bytes}
    if depth is Depth.DIGEST and not await store.verify(blob):
        return {"problem": "digest"}
    return None
