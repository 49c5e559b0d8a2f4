"""River, in Go: a module of its own, so that the product's go.mod knows nothing of it."""

from pathlib import Path
from typing import Final

from rara_bench import go_build
from rara_bench.arm import Bench, Figures
from rara_bench.peers.drain import drain_by

SETTINGS: Final = (
    "one process, MaxWorkers 2,000, FetchCooldown 2 ms, FetchPollInterval 20 ms, batched completion"
)
JOBS: Final = 20_000
_SOURCE: Final = Path(__file__).resolve().parents[2] / "river"
_REMAINING: Final = "select count(*) from river_job where state <> 'completed'"


async def drain(bench: Bench) -> Figures:
    """Raises CannotMeasure without Go."""
    program = await go_build.program(bench, _SOURCE, ".", "river")
    return await drain_by(bench, "river", [str(program)], jobs=JOBS, remaining=_REMAINING)
