"""A large artifact goes from step to step, and neither memory nor heartbeats are hurt by it."""

from pathlib import Path
from typing import Any

import pytest
from rara_client import Client
from rara_testing.bulk_transfer import Watch, move
from rara_testing.processes import Processes
from support.go_executor import spawn_go_executor
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

MIB = 1 << 20
LEASE_S = 9.0
HEARTBEAT_S = 1.0
CALM: dict[str, Any] = {
    "lease_s": LEASE_S,
    "heartbeat_s": HEARTBEAT_S,
    "silence_s": 5.0,
    "accept_timeout_s": 10.0,
}


@pytest.mark.needs("go")
@pytest.mark.parametrize(
    ("size_bytes", "bound_s"),
    [
        pytest.param(96 * MIB, 120.0, id="96 MiB"),
        pytest.param(2048 * MIB, 1500.0, id="2 GiB", marks=pytest.mark.soak),
    ],
)
async def test_memory_is_bounded_and_heartbeats_come_in_time(
    database_url: str, tmp_path: Path, size_bytes: int, bound_s: float
) -> None:
    """From Python to Go and back: both directions of both SDKs, each larger than the bound."""
    async with (
        Processes(tmp_path) as processes,
        spawned_scheduler(processes, database_url, tmp_path, **CALM) as scheduler,
        Client.connect(scheduler.address) as client,
    ):
        python = await spawn_executor(
            processes, scheduler.address, tmp_path, module="rara_testing.bulk", name="python", prestart=0
        )
        go = await spawn_go_executor(processes, scheduler.address, tmp_path)
        assert scheduler.process is not None
        pids = {"scheduler": scheduler.process.pid, "python": python.pid, "go": go.pid}
        ways = (("python", "go"), ("go", "python"))
        for seed, (maker, reader) in enumerate(ways):
            await move(client, maker, reader, size_bytes=MIB, seed=seed, folder=tmp_path, bound_s=60.0)
        async with Watch(pids, scheduler.world.raw, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S) as watch:
            for maker, reader in ways:
                await move(
                    client, maker, reader, size_bytes=size_bytes, seed=9, folder=tmp_path, bound_s=bound_s
                )
        assert watch.samples > 10
        assert max(watch.growth_bytes.values()) < 64 * MIB, watch.growth_bytes
        assert watch.lateness_s < 2 * HEARTBEAT_S
