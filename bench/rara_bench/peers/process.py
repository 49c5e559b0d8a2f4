"""One process of a peer: `python -m rara_bench.peers.process install|enqueue|work|latency PEER DSN COUNT`.

install: make the schema. enqueue: store COUNT jobs. work: say `ready`, and at `go` run jobs; say `first` when the first
handler begins, and `all` when COUNT have begun. latency: enqueue beside a working loop COUNT times; print JSON.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import Final, cast

from rara_bench.arithmetic import percentile
from rara_bench.peers.peer import Peer

NAMES: Final = ("pgqueuer", "oban", "absurd", "dbos", "procrastinate")
WARM_UP: Final = 20
GAP_S: Final = 0.02
_FEW: Final = 10  # at once, where there is but one job


def peer(name: str) -> Peer:
    if name not in NAMES:
        raise ValueError(f"no peer {name!r}: {', '.join(NAMES)}")
    return cast("Peer", importlib.import_module(f"rara_bench.peers.{name}").PEER)


def _work(of: Peer, dsn: str, count: int) -> None:
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some log to standard output
    print("ready", file=say, flush=True)
    sys.stdin.readline()
    begun = 0

    def on_start(number: int) -> None:  # noqa: ARG001 - jobs may come in any order
        nonlocal begun
        begun += 1
        if begun == 1:
            print("first", file=say, flush=True)
        if begun == count:
            print("all", file=say, flush=True)

    _run(of, of.work(dsn, on_start, of.concurrency))


async def _latency(of: Peer, dsn: str, count: int) -> None:
    began: dict[int, float] = {}
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_start(number: int) -> None:
        began[number] = time.perf_counter()
        loop.call_soon_threadsafe(arrived.set)

    working = asyncio.create_task(of.work(dsn, on_start, _FEW))
    await asyncio.sleep(2.0)  # until it listens
    waits_ms = []
    for number in range(WARM_UP + count):
        arrived.clear()
        sent = time.perf_counter()
        await of.enqueue_one(dsn, number)
        async with asyncio.timeout(20):
            while number not in began:
                await arrived.wait()
                arrived.clear()
        if number >= WARM_UP:
            waits_ms.append(1000 * (began[number] - sent))
        await asyncio.sleep(GAP_S)
    figures = {"p50_ms": percentile(waits_ms, 0.5), "p99_ms": percentile(waits_ms, 0.99)}
    print(json.dumps(figures), flush=True)
    working.cancel()
    os._exit(0)  # whatever else it has started


def _run(of: Peer, what: Coroutine[None, None, None]) -> None:
    import uvloop

    factory = uvloop.new_event_loop if of.uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(what)


def main() -> None:
    command, name, dsn, count = sys.argv[1:]
    of = peer(name)
    match command:
        case "install":
            _run(of, of.install(dsn))
        case "enqueue":
            _run(of, of.enqueue(dsn, int(count)))
        case "work":
            _work(of, dsn, int(count))
        case "latency":
            _run(of, _latency(of, dsn, int(count)))
        case _:
            raise SystemExit(f"no command {command!r}")


if __name__ == "__main__":
    main()
