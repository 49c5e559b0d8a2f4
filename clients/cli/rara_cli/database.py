"""The database's schema, as the scheduler's own migrations see it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime

from rara_cli.answers import print_document
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json, dumps
from rara_cli.session import Session

try:
    import asyncpg
    from rara_scheduler.store import migrate, pooler
except ImportError as error:
    raise CommandError(
        Exit.UNEXPECTED,
        "NOT_INSTALLED",
        f"this needs the scheduler ({error})",
        "pip install 'rara[scheduler]'",
    ) from error


async def migrate_database(session: Session, database_url: str) -> None:
    """Apply what is missing, and say what that was."""
    wait_s = session.timeout_s if session.timeout_s is not None else 60.0
    async with database_faults():
        await pooler.require_sessions(database_url)  # the lock against a second migration lives in a session
        applied = await migrate.migrate(database_url, wait_s=wait_s)
    if session.output == "json":
        print_document({"applied": [{"version": item.version, "name": item.name} for item in applied]})
        return
    for item in applied:
        _row(session, {"version": item.version, "name": item.name, "state": "applied"})
    if not applied and session.output in ("table", "wide"):
        print("the database is up to date")


async def show_status(session: Session, database_url: str) -> None:
    """Every migration, and whether the database has it."""
    async with database_faults():
        found = await migrate.status(database_url)
    states = dict.fromkeys(found.unknown, "newer") | dict.fromkeys(found.incompatible, "incompatible")
    rows = [
        _status_row(item.version, item.name, states.get(item, "applied"), item.applied_at)
        for item in found.applied
    ]
    rows += [_status_row(item.version, item.name, "pending", None) for item in found.pending]
    if session.output == "json":
        print_document({"is_current": found.is_current, "migrations": rows})
        return
    for row in rows:
        _row(session, row)
    if found.pending:
        session.note(f"{len(found.pending)} pending (next: rara db migrate)")
    if found.incompatible:
        session.note("the database is newer than this version of rara can work with (next: upgrade rara)")
    elif found.unknown:
        session.note("the database is newer than this version of rara, which goes on working with it")


def _status_row(version: str, name: str, state: str, applied_at: datetime | None) -> Json:
    row: Json = {"version": version, "name": name, "state": state}
    if applied_at is not None:
        row["applied_at"] = applied_at.isoformat()
    return row


def _row(session: Session, row: Json) -> None:
    match session.output:
        case "jsonl":
            print(dumps(row))
        case "name":
            print(row["version"])
        case _:
            at = f"  {row['applied_at']}" if "applied_at" in row else ""
            print(f"{row['version']}  {row['name']}  {row['state']}{at}")


@asynccontextmanager
async def database_faults() -> AsyncGenerator[None, None]:
    """What the database or its driver says, as an end of the command. Never shows the URL: it may hold a password."""
    try:
        yield
    except (migrate.MigrationError, pooler.PoolerUnsupported) as error:
        raise CommandError(Exit.REFUSED, error.code, str(error)) from error
    except ValueError as error:  # the driver's, for an address that it cannot read
        raise CommandError(
            Exit.USAGE, "USAGE", f"--database-url: {error}", "rara db migrate --help"
        ) from error
    except (OSError, TimeoutError, asyncpg.CannotConnectNowError) as error:
        why = str(error) or type(error).__name__
        raise CommandError(
            Exit.UNREACHABLE,
            "DATABASE_UNREACHABLE",
            f"the database cannot be reached: {why}",
            "check --database-url",
        ) from error
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise CommandError(
            Exit.NOT_ALLOWED, "DATABASE_REFUSED", str(error), "check --database-url"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise CommandError(
            Exit.NOT_ALLOWED, "DATABASE_REFUSED", str(error), "use the database's owner"
        ) from error
    except asyncpg.InvalidCatalogNameError as error:
        raise CommandError(
            Exit.NOT_FOUND, "DATABASE_NOT_FOUND", str(error), "createdb, or another URL"
        ) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise CommandError(Exit.UNEXPECTED, "DATABASE_FAILED", str(error)) from error
