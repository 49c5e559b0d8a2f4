"""All arms, in the order of a round: what is compared stands side by side."""

import sys
from functools import partial
from pathlib import Path
from typing import Final

from rara_bench import (
    backlog,
    go_build,
    heartbeat,
    held_snapshot,
    idle,
    latency,
    limit,
    memory,
    open_loop,
    product,
    slow_disk,
)
from rara_bench.arm import Arm, Bench, Figures
from rara_bench.operations import REPORT
from rara_bench.peers import drain as peers
from rara_bench.peers import river
from rara_bench.peers.process import NAMES, peer
from rara_bench.product import Shape

MOST_STEPS_A_RUN: Final = 10_000  # of one definition, by the product's limits
BACKLOG: Final = 1_000_000
SMALL_BACKLOG: Final = 10_000
_GO: Final = Path(__file__).resolve().parents[2] / "executors" / "go"


async def _drain(bench: Bench, name: str, shape: Shape = Shape()) -> Figures:  # noqa: B008 - it never changes
    return await product.drain(bench, name, shape)


async def _go(bench: Bench) -> Figures:
    program = await go_build.program(bench, _GO, "./cmd/rara-go-probe", "rara-go-probe")
    return await product.drain(bench, "go", Shape(command=(str(program),)))


async def _one_parent(bench: Bench) -> Figures:
    steps = min(bench.options.steps, MOST_STEPS_A_RUN)
    return await product.drain(bench, "one_parent", Shape(steps=steps, steps_a_run=steps))


async def _four_events(bench: Bench) -> Figures:
    shape = Shape(kind=REPORT, steps=bench.options.steps // 2, checkpoint=False)
    return await product.drain(bench, "wal", shape)


async def _peer(bench: Bench, name: str) -> Figures:
    return await peers.drain(bench, name)


async def _latency_pgqueuer(bench: Bench) -> Figures:
    return await peers.latency(bench, "pgqueuer")


def peer_settings() -> dict[str, str]:
    """What was chosen for each."""
    return {name: peer(name).settings for name in NAMES} | {"river": river.SETTINGS}


_IN_PROCESS: Final = Shape(command=(sys.executable, "-m", "rara_bench.in_process"))
_DRAIN: Final = Arm("drain", partial(_drain, name="drain"), "no-op steps in runs of 10, as delivered")

# The drain stands more than once, so that each of its companions has one close by: the machine drifts in minutes.
ARMS: Final = (
    Arm("limit", limit.measure, "ready/lease/result life in sets of 100, by pgbench"),
    _DRAIN,
    *(Arm(f"peer_{name}", partial(_peer, name=name), f"{name}: {peer(name).settings}") for name in NAMES),
    Arm("peer_river", river.drain, f"river: {river.SETTINGS}"),
    Arm("drain_go", _go, "the drain, through the Go executor"),
    _DRAIN,
    Arm(
        "drain_in_process",
        partial(_drain, name="in_process", shape=_IN_PROCESS),
        "the drain, handlers in the supervisor's process",
    ),
    Arm("drain_one_parent", _one_parent, "the drain, 10,000 steps in one run"),
    Arm(
        "drain_two_executors",
        partial(_drain, name="executors", shape=Shape(executors=2)),
        "the drain, one scheduler with two executors",
    ),
    Arm(
        "drain_two_schedulers",
        partial(_drain, name="schedulers", shape=Shape(schedulers=2, executors=2)),
        "the drain, two schedulers with an executor each",
    ),
    Arm("drain_held", partial(held_snapshot.measure, is_held=True), "the drain, a transaction held open"),
    Arm("drain_unheld", partial(held_snapshot.measure, is_held=False), "the same without"),
    Arm("drain_slow_disk", partial(slow_disk.measure, is_slow=True), "the drain, 2 ms more a flush"),
    Arm("drain_fast_disk", partial(slow_disk.measure, is_slow=False), "the same without"),
    Arm("drain_four_events", _four_events, "the drain, one report a step: four events"),
    Arm("latency_pgqueuer", _latency_pgqueuer, "pgqueuer: enqueue called to handler begun"),
    Arm("latency", latency.measure, "StartRun sent to terminal state seen by WatchRun"),
    Arm("open_loop_500", partial(open_loop.measure, per_s=500), "500 single-step runs a second, Poisson"),
    Arm("open_loop_1000", partial(open_loop.measure, per_s=1000), "1,000 a second"),
    Arm("backlog_10k", partial(backlog.measure, steps=SMALL_BACKLOG), "lease latency, 10,000 ready"),
    Arm("backlog_1m", partial(backlog.measure, steps=BACKLOG), "lease latency, 1,000,000 ready"),
    Arm("heartbeat", heartbeat.measure, "WAL of renewing 10,000 running steps"),
    Arm("idle", idle.measure, "statements of an idle scheduler with 10 executors"),
    Arm("memory", partial(memory.measure, go_source=_GO), "an idle executor with all its processes"),
)
