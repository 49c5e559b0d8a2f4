"""`rara artifact gc`: what garbage collection did, as people and programs read it."""

import asyncio

from rara_scheduler.blobs.collector import Amount, Collected, Collector, Policy, StrangeStore
from rara_scheduler.domain.errors import Fault
from rara_scheduler.store import migrate
from rara_scheduler.store.blobs import BlobRows
from rara_scheduler.store.database import Conflict, Database
from rara_scheduler.store.garbage import GarbageRows

from rara_cli.answers import show_one
from rara_cli.blobstore import opened_store
from rara_cli.dbcheck import refuse_other_schemas
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json
from rara_cli.session import Session
from rara_cli.words import size_text, took_text

_AGAIN = "rara artifact gc"


async def collect(
    session: Session,
    database_url: str,
    store_url: str,
    unused_s: float,
    grace_s: float,
    is_dry: bool,
    force: bool,
) -> int:
    """Collect, and show what was done; also of a collection that was cut off."""
    refuse_other_schemas(await migrate.status(database_url))
    policy = Policy(unused_s=unused_s, grace_s=grace_s, is_dry=is_dry, any_store=force)
    database = Database(database_url, call_connections=2, engine_connections=1)
    async with opened_store(store_url) as store:
        await database.open()
        collector = Collector(store, GarbageRows(database), BlobRows(database), policy, say=session.note)
        try:
            await collector.run()
        except StrangeStore as error:
            raise CommandError(
                Exit.REFUSED, "STORE_MISMATCH", str(error), f"{_AGAIN} --force, if it is"
            ) from error
        except (Fault, Conflict) as error:
            collector.collected.fail(str(error))
        except asyncio.CancelledError:
            session.farewell = (
                f"{collector.collected.removed.count} blobs were removed; the rest is as it was"
            )
            session.farewell_next = _AGAIN
            raise
        finally:
            await database.close()
    _show(session, collector.collected, policy)
    return Exit.UNREACHABLE if collector.collected.failures else Exit.OK


def _show(session: Session, collected: Collected, policy: Policy) -> None:
    show_one(
        session,
        _document(collected, policy),
        name=str(collected.removed.count),
        lines=lambda: _lines(collected, policy),
    )
    for error in collected.errors:
        session.note(f"not removed: {error}")
    if collected.failures:
        session.note(f"{collected.failures} failures; the next collection goes on (next: {_AGAIN})")


def _document(collected: Collected, policy: Policy) -> Json:
    def amount(found: Amount) -> Json:
        return {"count": found.count, "bytes": found.size_bytes}

    return {
        "dry_run": policy.is_dry,
        "kept": amount(collected.kept),
        "unused": amount(collected.unused),
        "orphans": amount(collected.orphans),
        "removed": amount(collected.removed),
        "uploads": amount(collected.uploads),
        "pending": collected.pending,
        "failures": collected.failures,
        "errors": list(collected.errors),
        "took_s": round(collected.took_s, 3),
    }


def _lines(collected: Collected, policy: Policy) -> list[str]:
    rows = [
        ("kept", collected.kept, "needed, or used lately"),
        ("unused", collected.unused, "nothing refers to them"),
        ("orphans", collected.orphans, "stored, and unknown to the database"),
        ("uploads", collected.uploads, "dead ones"),
    ]
    if not policy.is_dry:
        rows.append(("removed", collected.removed, "of unused, orphans, and what was marked before"))
    lines = [
        f"{name:8} {found.count:9,}  {size_text(found.size_bytes):>10}  {what}" for name, found, what in rows
    ]
    if collected.pending:
        lines.append(f"pending  {collected.pending:9,}              marked; for the next collection")
    end = "nothing was changed" if policy.is_dry else "done"
    return [*lines, f"{end} in {took_text(collected.took_s)}"]
