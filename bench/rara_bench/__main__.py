"""`python -m rara_bench`: measure, judge, write. `make bench` runs it in its own environment."""

import argparse
import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from rara_bench import rounds
from rara_bench.arm import Arm, Bench, Sample
from rara_bench.arms import ARMS
from rara_bench.options import Options
from rara_bench.server import Server, choose_binaries


async def _run(options: Options, folder: Path, arms: list[Arm]) -> tuple[list[Sample], dict[str, str]]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            Server(folder / "postgres", choose_binaries(options.postgres))
        )
        return await rounds.run(Bench(options, folder, server, stack), arms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = Options()
    parser.add_argument("--only", default="", help="arms or bars, by comma")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--tries", type=int, default=defaults.tries)
    parser.add_argument("--slots", type=int, default=defaults.slots)
    parser.add_argument("--jobs-per-runner", type=int, default=defaults.jobs_per_runner)
    given = parser.parse_args()
    options = Options(
        rounds=given.rounds,
        steps=given.steps,
        tries=given.tries,
        slots=given.slots,
        jobs_per_runner=given.jobs_per_runner,
    )
    names = given.only.split(",") if given.only else [arm.name for arm in ARMS]
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        Path(folder).chmod(0o711)
        asyncio.run(_run(options, Path(folder), [arm for arm in ARMS if arm.name in names]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
