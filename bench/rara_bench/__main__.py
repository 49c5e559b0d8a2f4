"""Measure the product, the physical limit and peers in turn on one PostgreSQL, and judge the figures by the bars.

Exit code 0: every bar is present and no floor is broken. 1: a figure is below its floor (with --strict: a bar is not
reached). 2: a bar is missing. 3: the benchmark itself failed. With --only, of what was chosen alone.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rara_bench import machine, report, rounds
from rara_bench.arm import Arm, Bench
from rara_bench.arms import ARMS, peer_settings
from rara_bench.bars import BARS, exit_code, judge, selected
from rara_bench.options import Options
from rara_bench.server import Server, ServerFailed, choose_binaries

_SETTINGS: Final = (
    "autovacuum",
    "checkpoint_timeout",
    "data_checksums",
    "fsync",
    "full_page_writes",
    "jit",
    "max_connections",
    "max_wal_size",
    "shared_buffers",
    "synchronous_commit",
    "wal_sync_method",
)


async def _run(options: Options, folder: Path, arms: list[Arm], facts: dict[str, Any]) -> rounds.Measured:
    _end_on_signals()
    async with AsyncExitStack() as stack:
        server = Server(folder / "postgres", choose_binaries(options.postgres))
        await stack.enter_async_context(server)
        facts["settings"]["postgres"] = await _postgres(server)
        return await rounds.run(Bench(options, folder, server, stack), arms)


async def _postgres(server: Server) -> dict[str, str]:
    connection = await server.connect()
    try:
        rows = await connection.fetch(
            "select name, current_setting(name) as value from pg_settings where name = any($1)", _SETTINGS
        )
    finally:
        await connection.close()
    binaries = server.binaries
    return {"version": binaries.version, "source": binaries.source} | {r["name"]: r["value"] for r in rows}


def _end_on_signals() -> None:
    """Cancel the run, so that all that it has started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="bars or arms; nothing is written")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="interleaved")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="of a drain")
    parser.add_argument("--tries", type=int, default=defaults.tries, help="of what others disturbed")
    parser.add_argument(
        "--others", type=float, default=defaults.others, help="share of the processors that others may use"
    )
    parser.add_argument("--slots", type=int, default=defaults.slots, help="of the executors, in all")
    parser.add_argument("--jobs-per-runner", type=int, default=defaults.jobs_per_runner)
    parser.add_argument("--no-uvloop", action="store_true", help="run the product on asyncio's own loop")
    parser.add_argument("--postgres", default=defaults.postgres, help="any, system, wheel, or a bin folder")
    parser.add_argument("--strict", action="store_true", help="fail where a bar is not reached")
    parser.add_argument(
        "--out", type=Path, help="folder for latest.json and pictures, instead of bench/results"
    )
    parser.add_argument("--folder", type=Path, help="where databases are kept meanwhile, on a real disk")
    return parser


def _options(given: argparse.Namespace) -> Options:
    return Options(
        rounds=given.rounds,
        steps=given.steps,
        tries=given.tries,
        others=given.others,
        slots=given.slots,
        jobs_per_runner=given.jobs_per_runner,
        uvloop=not given.no_uvloop,
        postgres=given.postgres,
    )


def _measure(options: Options, arms: list[Arm], place: Path | None) -> tuple[dict[str, Any], rounds.Measured]:
    """The facts of the run, and its samples."""
    with tempfile.TemporaryDirectory(prefix="rara-bench-", dir=place) as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL may have to run as another account
        facts: dict[str, Any] = {
            "command": " ".join(["make bench", *sys.argv[1:]]),
            "began": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine.facts(folder),
            "versions": machine.versions(),
            "options": options.record(),
            "settings": {"product": options.product, "peers": peer_settings()},
            "arms": {arm.name: arm.what for arm in arms},
        }
        began = time.monotonic()
        measured = asyncio.run(_run(options, folder, arms, facts))
        facts["took_s"] = round(time.monotonic() - began)
        facts["machine"]["load_after"] = os.getloadavg()
    return facts, measured


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    try:
        options = _options(given)
        chosen, bars = selected(names or [bar.name for bar in BARS], dict.fromkeys(arm.name for arm in ARMS))
    except ValueError as error:
        parser.error(str(error))
    arms = [arm for arm in ARMS if not names or arm.name in chosen]
    try:
        facts, (samples, missing) = _measure(options, arms, given.folder)
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 3
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 3
    verdicts = judge(samples, bars)
    result = report.document(facts, samples, verdicts, missing, others=options.others)
    if given.out or not names:
        report.write(result, given.out or report.RESULTS)
    if not given.out and not names:
        report.update_readme(result)
    print("\n".join(report.lines(verdicts, missing)))
    return exit_code(verdicts, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main())
