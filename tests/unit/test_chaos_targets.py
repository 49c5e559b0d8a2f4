"""What the chaos runner's targets are made of: disks, clocks, the engine's words, verdicts from answers."""

import asyncio
import errno
import json
import sys
from pathlib import Path

import pytest
import yaml
from rara.v1 import workflow_pb2
from rara_chaos import clock, disk
from rara_chaos.answers import judge_answers
from rara_chaos.composefaults import CLOCK_FILE, LEASE_S
from rara_chaos.docker import in_bytes
from rara_chaos.figures import Latency, latency
from rara_chaos.ledger import What
from rara_chaos.load import Confirmed
from rara_chaos.shapes import BY_NAME
from rara_client import NotFound
from rara_scheduler.settings import Settings as SchedulerSettings
from rara_testing.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
SUCCEEDED = workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED


def test_a_small_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    if why := disk.why_not(tmp_path):
        pytest.skip(why)
    with disk.mounted(tmp_path / "disk", size_bytes=1 << 20) as small:
        small.fill()
        with pytest.raises(OSError, match="No space left") as failure:
            (small.path / "more").write_bytes(bytes(1 << 16))
        assert failure.value.errno == errno.ENOSPC
        small.make_room()
        (small.path / "more").write_bytes(bytes(1 << 16))
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.needs("faketime")
async def test_a_clock_jumps_and_comes_back_while_timers_run_as_ever(tmp_path: Path) -> None:
    jumping = clock.Clock(tmp_path / "clocks" / "one")
    code = """
import threading, time
began_s = time.time()
for word, there in (("jumped", lambda: time.time() > began_s + 3000), ("back", lambda: time.time() < began_s + 3000)):
    print("ready", flush=True)
    while not there():
        threading.Event().wait(0.02)
    print(word, flush=True)
waited_s = time.monotonic()
threading.Event().wait(0.1)
print("waited" if time.monotonic() - waited_s < 60 else "late", flush=True)
"""
    async with Processes(tmp_path) as processes:
        process = await processes.start("clock", [sys.executable, "-c", code], env=jumping.environment)
        await process.expect_line("ready", 30)
        jumping.jump(clock.offset(0))
        await process.expect_line("jumped", 30)
        jumping.reset()
        await process.expect_line("back", 30)
        await process.expect_line("waited", 30)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("12.5MiB ", 13_107_200),
        ("1GiB", 1 << 30),
        ("512B", 512),
        ("0B", 0),
        ("3.5kB", 3500),
        ("--", 0),
        ("", 0),
    ],
)
def test_sizes_are_read_as_the_engine_writes_them(said: str, size: int) -> None:
    assert in_bytes(said) == size


def test_percentiles_are_of_what_was_seen() -> None:
    assert latency([]) == Latency(0, 0.0, 0.0, 0.0)
    assert latency([0.25]) == Latency(1, 250.0, 250.0, 250.0)
    assert latency([n / 1000 for n in range(101)]) == Latency(101, 50.0, 90.0, 99.0)


class Answers:
    """A client that knows these runs."""

    def __init__(self, *runs: workflow_pb2.GetRunResponse) -> None:
        self._runs = {answer.run.workflow_run_id: answer for answer in runs}

    async def get_run(
        self, workflow_run_id: str, *, include_steps: bool = False, timeout_s: float | None = None
    ) -> workflow_pb2.GetRunResponse:
        assert include_steps
        assert timeout_s
        try:
            return self._runs[workflow_run_id]
        except KeyError:
            raise NotFound("no such run", reason="RUN_NOT_FOUND", status="NOT_FOUND") from None


def answer(run_id: str, value: int, token: int) -> workflow_pb2.GetRunResponse:
    step = workflow_pb2.StepRun(
        step_run_id=f"step of {run_id}",
        step_name="a",
        state=workflow_pb2.STEP_RUN_STATE_SUCCEEDED,
        attempt=2,
        executor_name="x",
    )
    step.output.data = json.dumps({"value": value, "charge": {"token": token}}).encode()
    step.ended_at.GetCurrentTime()
    run = workflow_pb2.WorkflowRun(workflow_run_id=run_id, state=SUCCEEDED)
    return workflow_pb2.GetRunResponse(run=run, steps=[step])


def wrote(path: Path, *whats: tuple[What, int]) -> None:
    with path.open("a") as file:
        for at, (what, token) in enumerate(whats):
            line = {"what": what, "key": "k", "step_run_id": "step of r", "token": token}
            file.write(json.dumps(line | {"attempt": 1, "pid": 1, "at_s": float(at)}) + "\n")


def judged(
    path: Path, confirmed: list[Confirmed], *runs: workflow_pb2.GetRunResponse
) -> tuple[list[str], list[str]]:
    verdict = asyncio.run(judge_answers(Answers(*runs), path, confirmed, {"x": "python"}))
    assert verdict.attempts == 2 * len(runs)
    assert verdict.attempts_by_kind == ({"python": 2 * len(runs)} if runs else {})
    return verdict.violations, verdict.lost


def test_answers_that_are_right_break_no_promise(tmp_path: Path) -> None:
    run = Confirmed("r", BY_NAME["chaos-single"], 7)
    ledger = tmp_path / "ledger"
    wrote(ledger, (What.START, 1), (What.START, 4), (What.EFFECT, 4), (What.END, 4))
    assert judged(ledger, [run], answer("r", run.shape.values(7)["a"], 4)) == ([], [])


def test_answers_that_are_wrong_are_found(tmp_path: Path) -> None:
    run = Confirmed("r", BY_NAME["chaos-single"], 7)
    value = run.shape.values(7)["a"]
    ledger = tmp_path / "ledger"
    wrote(ledger, (What.START, 1), (What.EFFECT, 1), (What.START, 4), (What.EFFECT, 4))
    assert judged(ledger, [run]) == ([], ["run r"])
    (wrong,), _ = judged(tmp_path / "none", [run], answer("r", value + 1, 4))
    assert f"not {value}" in wrong
    (repeated,), _ = judged(ledger, [run], answer("r", value, 1))
    assert repeated == "k: token 4 did the effect again that token 1 had recorded"
    (never,), _ = judged(ledger, [run], answer("r", value, 9))
    assert never == "k: the recorded effect of token 9 was never done"


# ---------------------------------------------------------------- what is added to the compose file


def services(path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = yaml.safe_load(path.read_text())["services"]
    return found


def test_the_compose_files_of_chaos_are_about_what_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = services(ROOT / "deploy" / "docker-compose.yml")
    added = [services(path) for path in sorted((ROOT / "chaos").glob("compose*.yml"))]
    assert len(added) == 4
    assert {name for one in added for name in one} - {"disks"} <= set(delivered)
    (timed,) = [
        one["scheduler"]["environment"] for one in added if "RARA_LEASE_S" in str(one.get("scheduler"))
    ]
    assert isinstance(timed, dict)
    for name, value in timed.items():
        assert name.removeprefix("RARA_").lower() in SchedulerSettings.model_fields
        monkeypatch.setenv(name, value)
    settings = SchedulerSettings(database_url="postgresql://rara@database/rara")
    assert settings.lease_s == float(timed["RARA_LEASE_S"]) == LEASE_S


def test_a_containers_clock_is_told_as_a_processs_is() -> None:
    added = services(ROOT / "chaos" / "compose.clocks.yml")
    assert set(added) == {"scheduler", "python-executor"}
    for one in added.values():
        assert one["environment"] == clock.environment("/chaos/libfaketime.so.1", CLOCK_FILE)
