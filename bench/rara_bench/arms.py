"""All arms, in the order of a round: what is compared stands side by side."""

import sys
from pathlib import Path
from typing import Final

from rara_bench import go_build, limit, product
from rara_bench.arm import Arm, Bench, Figures
from rara_bench.peers import drain as peers
from rara_bench.peers import river
from rara_bench.peers.process import NAMES, peer
from rara_bench.product import Shape

_GO: Final = Path(__file__).resolve().parents[2] / "executors" / "go"
MOST_STEPS_A_RUN: Final = 10_000  # of one definition, by the product's limits


async def _drain(bench: Bench) -> Figures:
    return await product.drain(bench, "drain", Shape())


async def _in_process(bench: Bench) -> Figures:
    command = (sys.executable, "-m", "rara_bench.in_process")
    return await product.drain(bench, "in_process", Shape(command=command))


async def _go(bench: Bench) -> Figures:
    program = await go_build.program(bench, _GO, "./cmd/rara-go-probe", "rara-go-probe")
    return await product.drain(bench, "go", Shape(command=(str(program),)))


async def _latency_pgqueuer(bench: Bench) -> Figures:
    return await peers.latency(bench, "pgqueuer")


def _peer(name: str) -> Arm:
    async def measure(bench: Bench) -> Figures:
        return await peers.drain(bench, name)

    return Arm(f"peer_{name}", measure, f"{name}: {peer(name).settings}")


ARMS: Final = (
    Arm("limit", limit.measure, "ready/lease/result life in sets of 100, pgbench"),
    Arm("drain", _drain, "no-op steps in runs of 10, as delivered"),
    *(_peer(name) for name in NAMES),
    Arm("peer_river", river.drain, f"river: {river.SETTINGS}"),
    Arm("latency_pgqueuer", _latency_pgqueuer, "pgqueuer: enqueue called to handler begun"),
    Arm("drain_in_process", _in_process, "the same, handlers in the supervisor's process"),
    Arm("drain_go", _go, "the same through the Go executor"),
)
