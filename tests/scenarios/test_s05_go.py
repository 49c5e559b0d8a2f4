"""S05 with a Go and a Python executor, each a real process: who runs what is what the oracle says."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_testing.conformance import Target, Way, verify
from rara_testing.conformance.run import Verdict
from rara_testing.processes import Processes
from rara_testing.scripted_executor import WAIT_S
from support.go_executor import program, spawn_go_executor
from support.routing_oracle import TAKES, Has, Want, runs_as
from support.running_scheduler import SWEEP_S, RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor

pytestmark = [pytest.mark.needs("go"), pytest.mark.case("S05")]

GO = Has(
    "go",
    "go",
    {"where.a": ("1.4.2", "1.10.0"), "where.b": ("10.0.0",)},
    (("zone", "x"), ("gpu", "a100")),
)
PYTHON = Has("python", "python", {"where.a": ("1.4.2", "2.0.0-rc1"), "where.b": ("1.4.2",)}, (("zone", "x"),))
WANTS = [
    *(Want(kind, version) for kind in ("where.a", "where.b") for version in TAKES),
    *(
        Want("where.a", version, kind)
        for version in ("", "1", "2.0.0-rc1")
        for kind in ("go", "python", "rust")
    ),
    *(
        Want("where.a", "1.4", "", labels)
        for labels in (
            (("zone", "x"),),
            (("zone", "y"),),
            (("gpu", "a100"),),
            (("gpu", "a100"), ("zone", "x")),
        )
    ),
    Want("where.b", "", "python", (("gpu", "a100"),)),
    Want("where.c"),
]
LIMITS = {"go": 2, "python": 1}  # of where.narrow, which takes a while


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The build is nobody's test."""
    program("rara-go-chaos")
    program("rara-go-probe")


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened, Processes(tmp_path) as processes:
        labels = {has.name: ",".join(f"{key}={value}" for key, value in has.labels) for has in (GO, PYTHON)}
        await asyncio.gather(
            spawn_go_executor(
                processes, opened.address, tmp_path, command="rara-go-chaos", labels=labels["go"]
            ),
            spawn_executor(
                processes,
                opened.address,
                tmp_path,
                module="support.where_handlers",
                name="python",
                labels=labels["python"],
            ),
        )
        yield opened


async def outputs(world: RunningScheduler) -> list[tuple[str, str, dict[str, Any]]]:
    """Step, kind of the executor that holds its result, and what the handler said itself."""
    rows = await world.raw.fetch(
        "select s.step_name, x.executor_kind, r.output, r.attempt, r.failures from rara.result r"
        " join rara.step_run s using (step_run_id) join rara.executor x using (executor_id)"
    )
    assert {(row["attempt"], row["failures"]) for row in rows} == {(1, 0)}
    return [(row["step_name"], row["executor_kind"], json.loads(row["output"])) for row in rows]


async def until_results(world: RunningScheduler, count: int) -> None:
    async def all_done() -> bool:
        return bool(await world.raw.fetchval("select count(*) from rara.result") == count)

    await until(all_done, f"{count} results")


async def test_each_step_runs_where_the_oracle_allows_and_as_the_version_it_names(
    world: RunningScheduler,
) -> None:
    steps = {}
    for number, want in enumerate(WANTS):
        fields: dict[str, Any] = {"kind": want.kind, "kind_version": want.version}
        fields |= {"executor_kind": want.executor_kind, "required_labels": dict(want.labels)}
        steps[f"s{number:02}"] = fields
    await world.define("matrix", steps, on_failure="CONTINUE")
    expected = {
        name: {has.name: version for has in (GO, PYTHON) if (version := runs_as(want, has)) is not None}
        for name, want in zip(steps, WANTS, strict=True)
    }
    # The matrix has steps for one of them, for the other, for both and for none, or it would show nothing.
    assert {frozenset(can) for can in expected.values()} == {
        frozenset(),
        frozenset({"go"}),
        frozenset({"python"}),
        frozenset({"go", "python"}),
    }
    rounds = 3
    runs = [await world.start("matrix") for _ in range(rounds)]
    await until_results(world, rounds * sum(bool(can) for can in expected.values()))
    await world.raw.fetchval("select pg_sleep($1)", SWEEP_S)  # for what must not happen
    ran: Counter[str] = Counter()
    for step, kind, said in await outputs(world):
        assert said["language"] == kind
        assert expected[step].get(kind) == said["version"], (step, kind, said)
        ran[step] += 1
    assert ran == {step: rounds for step, can in expected.items() if can}
    rows = await world.raw.fetch(
        "select step_run_id::text, step_name, state, attempt from rara.step_state"
        " where workflow_run_id = $1::uuid",
        runs[0],
    )
    for row in rows:
        if not expected[row["step_name"]]:
            assert (row["state"], row["attempt"]) == ("pending", 0)
            request = workflow_pb2.ExplainStepRequest(step_run_id=row["step_run_id"])
            answer = await world.workflows.ExplainStep(request, timeout=WAIT_S)
            assert [o.code for o in answer.obstacles] == ["NO_CAPABLE_EXECUTOR"], row["step_name"]


async def test_no_executor_runs_more_of_a_kind_at_once_than_it_offers(world: RunningScheduler) -> None:
    await world.define("narrow", {f"s{number:02}": {"kind": "where.narrow"} for number in range(24)})
    assert await world.until_run(await world.start("narrow"), "succeeded") == "succeeded"
    edges: dict[str, list[tuple[float, int]]] = {"go": [], "python": []}
    for _, kind, said in await outputs(world):
        begin, end = said["stay"]
        edges[kind] += [(begin, 1), (end, -1)]
    for kind, limit in LIMITS.items():
        now = most = 0
        for _, step in sorted(edges[kind]):
            now += step
            most = max(most, now)
        assert most == limit, kind


async def test_a_job_that_does_not_fit_is_refused_before_any_user_code(tmp_path: Path) -> None:
    """Sent by force, by a scripted scheduler; the Python executor's turn is in test_s05_executor_routing.py."""
    command = str(program("rara-go-probe"))
    wrong = [
        "an_unknown_kind_is_refused",
        "an_unknown_version_is_refused",
        "more_jobs_than_slots_are_refused",
    ]
    outcomes = await verify(Target(tmp_path, command=command, way=Way.SESSION), only=wrong)
    assert [(one.scenario.name, one.verdict) for one in outcomes] == [(name, Verdict.KEPT) for name in wrong]
