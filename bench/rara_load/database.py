"""What the load leaves in the database, and whether its history keeps the promises: `rara db check`."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import asyncpg

_CONNECT_S: Final = 10.0
_QUERY_S: Final = 60.0
PROMISE_BROKEN: Final = 7  # the exit code of `rara db check`

# Partitions count as the table that they belong to.
_TABLES: Final = """
select c.relname as name, sum(s.n_live_tup)::bigint as live_tuples, sum(s.n_dead_tup)::bigint as dead_tuples,
       sum(pg_table_size(s.relid))::bigint as table_bytes, sum(pg_indexes_size(s.relid))::bigint as index_bytes
  from pg_stat_user_tables s
  join pg_class c on c.oid = coalesce(pg_partition_root(s.relid), s.relid)
 where s.schemaname = 'rara'
 group by c.relname
 order by 4 desc, 1
"""
_WHOLE: Final = (
    "select pg_database_size(current_database()) as size_bytes,"
    " (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as wal_bytes"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    size_bytes: int
    wal_bytes: int  # written since the database was made
    tables: dict[str, dict[str, int]]

    def as_json(self) -> dict[str, object]:
        return {"size_bytes": self.size_bytes, "tables": self.tables}


async def sizes(url: str) -> Sizes:
    """Raises OSError and asyncpg.PostgresError."""
    connection = await asyncpg.connect(url, timeout=_CONNECT_S, command_timeout=_QUERY_S)
    try:
        whole = await connection.fetchrow(_WHOLE)
        rows = await connection.fetch(_TABLES)
    finally:
        await connection.close(timeout=_CONNECT_S)
    if whole is None:
        raise AssertionError("an aggregate gives a row")
    tables = {row["name"]: {key: row[key] for key in row.keys() if key != "name"} for row in rows}  # noqa: SIM118
    return Sizes(whole["size_bytes"], whole["wal_bytes"], tables)


@dataclass(frozen=True, slots=True)
class Checked:
    """was_run False: it was left out. violations None: it could not say. report: what it printed, or why not."""

    was_run: bool
    violations: int | None = None
    report: object = None

    def as_json(self) -> dict[str, object]:
        return {"was_run": self.was_run, "violations": self.violations, "report": self.report}


async def checked(url: str, command: Sequence[str], timeout_s: float) -> Checked:
    """The history checker's verdict. command: what to run in place of `rara db check -o json`."""
    if not url and not command:
        return Checked(was_run=False, report="no --database and no --check was given")
    env = {**os.environ, "RARA_DATABASE_URL": url} if url else dict(os.environ)
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", "rara_cli", "db", "check", "-o", "json")),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        return Checked(was_run=True, report=f"it had not ended after {timeout_s:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _verdict(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def _verdict(code: int | None, out: str, err: str) -> Checked:
    try:
        said = json.loads(out)
        total = int(said["total"])
    except (ValueError, KeyError, TypeError):  # a command of the caller's own need not speak JSON
        said, total = out.strip() or err.strip(), 1
    if code == 0:
        return Checked(was_run=True, violations=0, report=_short(said))
    if code == PROMISE_BROKEN:
        return Checked(was_run=True, violations=max(total, 1), report=_short(said))
    return Checked(was_run=True, report=f"exit code {code}: {err.strip()[-1000:]}")


def _short(said: object) -> object:
    """Without the rules that hold."""
    if not isinstance(said, dict):
        return str(said)[-1000:]
    rules = said.get("rules", [])
    return {
        "rules": len(rules),
        "broken": [rule for rule in rules if rule["total"]],
        "violations": said["violations"],
    }
