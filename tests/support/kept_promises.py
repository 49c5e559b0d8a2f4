"""What a test leaves in its database breaks no promise."""

import asyncpg
from rara_scheduler.store.check import check

_DEFAULT_MAX_ATTEMPTS = 3


async def assert_promises_kept(
    database_url: str, *, max_attempts: int = _DEFAULT_MAX_ATTEMPTS, overdue_s: float | None = None
) -> None:
    """Hold the history against every rule. A database that the test has taken away is left alone.

    max_attempts: of steps whose definition does not say. overdue_s: for a system that has become quiet.
    """
    try:
        connection = await asyncpg.connect(database_url, timeout=10)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        return
    try:
        report = await check(connection, max_attempts=max_attempts, overdue_s=overdue_s)
    finally:
        await connection.close(timeout=10)
    assert report.is_clean, "\n".join(map(str, report.violations))
