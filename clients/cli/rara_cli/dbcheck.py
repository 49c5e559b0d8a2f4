"""`rara db check`: what the history checker finds, as people and programs read it."""

from collections.abc import Sequence

import asyncpg
from rara_scheduler.domain.errors import Code
from rara_scheduler.store import migrate
from rara_scheduler.store.check import Depth, Finding, Report, Violation, check, check_blob_bytes

from rara_cli.answers import print_document, width
from rara_cli.blobstore import opened_store
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json, dumps
from rara_cli.session import Session
from rara_cli.tables import Column, render

_CONNECT_TIMEOUT_S = 10.0
_QUERY_TIMEOUT_S = 600.0

_COLUMNS: tuple[Column[Violation], ...] = (
    Column("RULE", lambda item: item.rule, is_whole=True),
    Column("STEP OR RUN", lambda item: item.step_run_id or item.workflow_run_id, is_whole=True),
    Column("OF RUN", lambda item: item.workflow_run_id if item.step_run_id else "", wide_only=True),
    Column("FACTS", lambda item: dumps(item.facts)),
)


async def check_history(
    session: Session,
    database_url: str,
    *,
    blob_store: str | None,
    blobs: str | None,
    overdue_s: float | None,
    max_attempts: int | None,
    limit: int,
) -> int:
    """Check, show what was found; the exit code."""
    depth = _depth(blob_store, blobs)
    refuse_other_schemas(await migrate.status(database_url))
    connection = await asyncpg.connect(
        database_url, timeout=_CONNECT_TIMEOUT_S, server_settings={"application_name": "rara db check"}
    )
    try:
        report = await check(
            connection,
            limit=limit,
            overdue_s=overdue_s,
            max_attempts=max_attempts,
            statement_timeout_s=session.timeout_s or _QUERY_TIMEOUT_S,
        )
        if depth is not None and blob_store is not None:
            report = Report((*report.findings, await _blob_bytes(connection, blob_store, depth, limit)))
    except asyncpg.QueryCanceledError as error:
        raise CommandError(
            Exit.STILL_GOING, "CHECK_TIMEOUT", "a query took longer than --timeout", "--timeout 1h"
        ) from error
    finally:
        await connection.close(timeout=_CONNECT_TIMEOUT_S)
    _show(session, report)
    return Exit.OK if report.is_clean else Exit.PROMISE_BROKEN


def refuse_other_schemas(found: migrate.MigrationStatus) -> None:
    """The rules are about this version's tables."""
    if found.unknown:
        raise CommandError(
            Exit.REFUSED,
            Code.SCHEMA_TOO_NEW,
            "the database is newer than this version of rara",
            "upgrade rara",
        )
    if found.pending:
        raise CommandError(
            Exit.REFUSED,
            Code.SCHEMA_TOO_OLD,
            f"{len(found.pending)} migrations are missing",
            "rara db migrate",
        )


def _depth(blob_store: str | None, blobs: str | None) -> Depth | None:
    """How closely to look at blobs; None: not at all."""
    if blob_store is None and blobs in ("size", "digest"):
        raise CommandError(Exit.USAGE, "USAGE", f"--blobs {blobs} needs --blob-store", "set RARA_BLOB_STORE")
    asked = blobs or ("none" if blob_store is None else "size")
    return None if asked == "none" else Depth(asked)


async def _blob_bytes(
    connection: "asyncpg.Connection[asyncpg.Record]", url: str, depth: Depth, limit: int
) -> Finding:
    async with opened_store(url) as store:
        return (await check_blob_bytes(connection, store, depth=depth, limit=limit)).finding


def _show(session: Session, report: Report) -> None:
    match session.output:
        case "json":
            print_document(
                {
                    "is_clean": report.is_clean,
                    "total": report.total,
                    "rules": [_rule(finding) for finding in report.findings],
                    "violations": [_violation(violation) for violation in report.violations],
                }
            )
        case "jsonl":
            for violation in report.violations:
                print(dumps(_violation(violation)))
        case "name":
            for name in report.broken:
                print(name)
        case _:
            _show_table(session, report)


def _show_table(session: Session, report: Report) -> None:
    if report.is_clean:
        print(f"history breaks none of {len(report.findings)} rules")
        return
    columns = [column for column in _COLUMNS if session.output == "wide" or not column.wide_only]
    for line in render(report.violations, columns, width=width(session), in_color=session.in_color):
        print(line)
    session.note("")
    for line in _summary([finding for finding in report.findings if finding.total]):
        session.note(line)


def _summary(broken: Sequence[Finding]) -> list[str]:
    """A line for each broken rule: what should hold, and how often it does not."""
    return [
        f"{finding.rule.name}: {finding.total} against: {finding.rule.promise}"
        + (f" ({len(finding.violations)} listed)" if finding.total > len(finding.violations) else "")
        for finding in broken
    ]


def _rule(finding: Finding) -> Json:
    return {
        "name": finding.rule.name,
        "promise": finding.rule.promise,
        "total": finding.total,
        "took_s": round(finding.took_s, 3),
    }


def _violation(violation: Violation) -> Json:
    return {
        "rule": violation.rule,
        "workflow_run_id": violation.workflow_run_id,
        "step_run_id": violation.step_run_id,
        "facts": dict(violation.facts),
    }
