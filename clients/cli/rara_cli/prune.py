"""`rara db prune`: what is past retention, as people and programs read it."""

from rara_scheduler.domain.errors import Fault
from rara_scheduler.loops.retention import Pruned, Pruner
from rara_scheduler.store import migrate
from rara_scheduler.store.database import Conflict, Database, DataRefused
from rara_scheduler.store.history import HistoryStore
from rara_scheduler.store.retention import Expired, RetentionStore

from rara_cli.answers import show_one
from rara_cli.ask import confirm
from rara_cli.dbcheck import refuse_other_schemas
from rara_cli.exits import CommandError, Exit
from rara_cli.session import Session
from rara_cli.words import size_text

_STATEMENT_TIMEOUT_S = 60.0


async def prune(session: Session, database_url: str, keep_days: int, days_ahead: int, is_dry: bool) -> int:
    """Show what would go, ask, remove it; the exit code."""
    refuse_other_schemas(await migrate.status(database_url))
    database = Database(
        database_url, call_connections=2, engine_connections=1, statement_timeout_s=_STATEMENT_TIMEOUT_S
    )
    await database.open()
    try:
        store = RetentionStore(database)
        pruner = Pruner(HistoryStore(database), store, days_ahead=days_ahead, keep_days=keep_days)
        expired = await store.expired(keep_days)
        if is_dry:
            _show_expired(session, expired, keep_days)
            return Exit.OK
        confirm(session, f"remove up to {_what(expired)}, which ended more than {keep_days} days ago")
        pruned = await pruner.prune()
    except (Fault, Conflict, DataRefused) as error:
        raise CommandError(
            Exit.UNREACHABLE, "PRUNE_UNFINISHED", str(error), "rara db prune again: it goes on"
        ) from error
    finally:
        await database.close()
    _show_pruned(session, pruned)
    return Exit.UNREACHABLE if pruned.left else Exit.OK


def _what(expired: Expired) -> str:
    return (
        f"{expired.runs:,} runs with {expired.steps:,} steps and {expired.partitions} partitions of history"
        f" ({size_text(expired.partition_bytes)})"
    )


def _show_expired(session: Session, expired: Expired, keep_days: int) -> None:
    oldest = expired.oldest.isoformat() if expired.oldest else None
    show_one(
        session,
        {
            "dry_run": True,
            "keep_days": keep_days,
            "runs": expired.runs,
            "steps": expired.steps,
            "oldest_ended_at": oldest,
            "partitions": expired.partitions,
            "partition_bytes": expired.partition_bytes,
        },
        name=str(expired.runs),
        lines=lambda: [
            f"past retention: {_what(expired)}",
            *([f"the oldest ended at {oldest}"] if oldest else []),
            "nothing was changed",
        ],
    )


def _show_pruned(session: Session, pruned: Pruned) -> None:
    show_one(
        session,
        {
            "dry_run": False,
            "runs": pruned.runs,
            "steps": pruned.steps,
            "partitions_created": list(pruned.created),
            "partitions_dropped": list(pruned.dropped),
            "left": pruned.left[0] if pruned.left else None,
        },
        name=str(pruned.runs),
        lines=lambda: [
            f"removed {pruned.runs:,} runs with {pruned.steps:,} steps",
            f"partitions: {len(pruned.dropped)} dropped, {len(pruned.created)} made",
        ],
    )
    if pruned.left:
        session.note(f"run {pruned.left[0]} had to be left: {pruned.left[1]} (next: rara db prune)")
