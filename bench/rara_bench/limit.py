"""The physical limit: the life of steps in sets of 100 by pgbench, which costs next to nothing itself."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Final

from rara_bench import machine
from rara_bench.arm import Bench, CannotMeasure, Figures

SET: Final = 100
CLIENTS: Final = 2
SECONDS: Final = 4
RUNS: Final = 2000
_DATABASE: Final = "limit_life"
_SCRIPTS: Final = Path(__file__).with_name("sql")
_TRANSACTIONS: Final = re.compile(r"number of transactions actually processed: (\d+)")
_RATE: Final = re.compile(r"tps = ([0-9.]+) \(without initial connection time\)")


async def measure(bench: Bench) -> Figures:
    await bench.server.create(_DATABASE)
    schema = (_SCRIPTS / "limit_schema.sql").read_text(encoding="utf-8")
    await bench.server.execute(schema, _DATABASE)
    await bench.server.settle(_DATABASE)
    connection = await bench.server.connect(_DATABASE)
    try:
        wal = -await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        postgres_s = -machine.cpu_s([bench.server.pid])
        sets, sets_per_s = await _pgbench(bench)
        postgres_s += machine.cpu_s([bench.server.pid])
        wal += await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        done = await connection.fetchval("select count(*) from life_result")
    finally:
        await connection.close()
    await bench.server.drop(_DATABASE)
    return {
        "steps_per_s": sets_per_s
        * done
        / sets,  # a lease may find less than a set: the other client has the rest
        "wal_bytes_per_step": float(wal) / done,
        "postgres_cpu_ms_per_step": 1000 * postgres_s / done,
    }


async def _pgbench(bench: Bench) -> tuple[int, float]:
    """Sets done, and sets a second."""
    beside = bench.server.binaries.bin / "pgbench"
    program = str(beside) if beside.exists() else shutil.which("pgbench")
    if program is None:
        raise CannotMeasure("pgbench is not here (Debian has it in postgresql-15)")
    process = await asyncio.create_subprocess_exec(
        program,
        *("--no-vacuum", "--protocol=prepared", f"--client={CLIENTS}", f"--jobs={CLIENTS}"),
        *(f"--time={SECONDS}", f"--define=steps={SET}", f"--define=runs={RUNS}"),
        f"--file={_SCRIPTS / 'limit_life.sql'}",
        bench.server.dsn(_DATABASE),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    transactions, rate = _TRANSACTIONS.search(out.decode()), _RATE.search(out.decode())
    if process.returncode != 0 or transactions is None or rate is None:
        raise RuntimeError(f"pgbench failed: {err.decode()[-2000:]}")
    return int(transactions[1]), float(rate[1])
