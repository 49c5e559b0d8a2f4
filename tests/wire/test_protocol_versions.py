"""A peer of the version before is served: old and new executors with new and old schedulers, whoever dials.

There is one version yet, so one side is made to be of the next release here, which speaks two.
"""

from pathlib import Path

import grpc
import pytest
import rara_executor.protocol
import rara_scheduler.protocol
from google.rpc import error_details_pb2, status_pb2
from rara_testing.job_events import accepted, running, succeeded
from rara_testing.ports import free_port
from rara_testing.scripted_executor import ScriptedExecutor
from support.running_executor import running as running_executor
from support.running_scheduler import KIND, RunningScheduler, beating, running_scheduler

SCHEDULER, EXECUTOR = rara_scheduler.protocol, rara_executor.protocol


def of_next_release(monkeypatch: pytest.MonkeyPatch, *sides: object) -> None:
    for side in sides:
        monkeypatch.setattr(side, "NEWEST", 2)
        monkeypatch.setattr(side, "OLDEST", 1)


async def refusal_of(executor: ScriptedExecutor) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Status and code, and what it names for falling back."""
    code, _, trailers = await executor.failure()
    details = trailers["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return code, info.reason, dict(info.metadata)


async def one_job(world: RunningScheduler) -> None:
    await world.define("one", {"a": {"kind": "demo.echo"}})
    run_id = await world.start("one", value=7)
    assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded"


async def test_a_new_scheduler_serves_the_version_before_and_no_other(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_next_release(monkeypatch, SCHEDULER)
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("one", {"a": {}})
        async with ScriptedExecutor() as old:
            await old.connect(world.address)
            await old.hello([KIND], protocol_version=1)
            assert (await old.expect("welcome")).protocol_version == 1
            await old.credit(1)
            async with beating(old):
                run_id = await world.start("one")
                job = await old.expect_job()
                await old.events(accepted(job.lease), running(job.lease), succeeded(job.lease))
                assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        for version in (0, 3):
            async with ScriptedExecutor() as stranger:
                await stranger.connect(world.address)
                await stranger.hello([KIND], protocol_version=version)
                assert await refusal_of(stranger) == (
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "PROTOCOL_VERSION_UNSUPPORTED",
                    {"oldest": "1", "newest": "2"},
                )


@pytest.mark.parametrize(
    "newer", [[SCHEDULER], [EXECUTOR], [SCHEDULER, EXECUTOR]], ids=["scheduler", "executor", "both"]
)
@pytest.mark.parametrize("dialled", [False, True], ids=["dials", "dialled"])
async def test_old_and_new_work_together(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: list[object], dialled: bool
) -> None:
    of_next_release(monkeypatch, *newer)
    listen = f"127.0.0.1:{free_port()}" if dialled else ""
    direct = (listen,) if dialled else ()
    async with (
        running_scheduler(database_url, tmp_path, direct_executors=direct) as world,
        running_executor(world.address, tmp_path, listen=listen),
    ):
        await one_job(world)
