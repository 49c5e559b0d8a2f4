"""The arithmetic of the load generator: when turns are due, what is added up, and what counts as wrong."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from rara.v1 import workflow_pb2
from rara_load.arrivals import arrivals
from rara_load.database import Checked
from rara_load.figures import Figures, Latencies, Point, merged
from rara_load.pace import Pace
from rara_load.picture import draw
from rara_load.plan import Form, Kind, Plan, PlanInvalid, steps_of, weights
from rara_load.report import Result
from rara_load.settle import Tally
from rara_load.shapes import definition, graph
from rara_load.turns import LABEL, PLANNED, WARM_UP, Caller, Turn

CALLERS = Plan(callers=1)


def test_arrivals_are_even_or_at_random_with_the_same_mean() -> None:
    even = list(itertools.islice(arrivals(50, poisson=False, draw=random.Random(1)), 101))
    assert even[:3] == [0.0, 0.02, 0.04]
    assert even[-1] == 2.0
    drawn = [list(itertools.islice(arrivals(50, poisson=True, draw=random.Random(1)), 5000)) for _ in "ab"]
    assert drawn[0] == drawn[1]
    assert drawn[0] == sorted(drawn[0])
    assert drawn[0][-1] == pytest.approx(100, rel=0.1)


def test_percentiles_are_in_order_and_right_to_three_digits() -> None:
    latencies = Latencies()
    assert latencies.summary() == {"count": 0}
    for ms in range(1, 10_001):
        latencies.record(ms / 1000)
    summary = latencies.summary()
    named = {"p50_ms": 5000, "p90_ms": 9000, "p99_ms": 9900, "p999_ms": 9990, "max_ms": 10_000}
    for name, ms in named.items():
        assert summary[name] == pytest.approx(ms, rel=0.002)
    assert summary["count"] == 10_000
    assert summary["mean_ms"] == pytest.approx(5000.5, rel=0.002)
    curve = latencies.curve()
    assert [ms for _, ms in curve] == sorted(ms for _, ms in curve)
    assert curve[-2][0] == 99.99  # one of 10,000: for 99.999 there are too few


def test_what_takes_longer_than_an_hour_counts_as_an_hour() -> None:
    latencies = Latencies()
    latencies.record(7200)
    latencies.record(-1)
    assert latencies.count == 2
    assert latencies.at_ms(100) == pytest.approx(3_600_000, rel=0.001)


class _SlowCaller:
    """Each turn takes its time."""

    def __init__(self, figures: Figures, turn_s: float) -> None:
        self.figures = figures
        self.turns: list[Turn] = []
        self._turn_s = turn_s

    async def take(self, turn: Turn) -> None:
        self.turns.append(turn)
        await asyncio.sleep(self._turn_s)


async def test_a_slow_system_does_not_thin_out_the_turns_that_are_due() -> None:
    """Coordinated omission: with one at a time of 20 ms each, turns of every 5 ms are begun ever later."""
    plan = Plan(rate=200, poisson=False, warm_up_s=0.02, duration_s=0.2, max_in_flight=1)
    slow = _SlowCaller(Figures(), 0.02)
    pace = Pace(plan, cast("Caller", slow), asyncio.Event())
    await pace.run()
    due = [turn.due_s - pace.began_s for turn in slow.turns]
    assert due == pytest.approx([number / 200 for number in range(len(due))])
    assert [turn.is_measured for turn in slow.turns] == [at_s >= 0.02 - 1e-9 for at_s in due]
    lag = slow.figures.send_lag
    assert lag.count == sum(turn.is_measured for turn in slow.turns)
    assert lag.at_ms(100) > 15 * (len(due) - 1) * 0.9
    assert slow.figures.not_begun >= 40 - len(due)


def test_points_are_halved_with_nothing_lost_and_the_worse_latency_kept() -> None:
    points = [Point(float(n + 1), 1.0, 10, 5, n, float(n), float(10 * n)) for n in range(5)]
    found = merged(points)
    assert found[0] == Point(2.0, 2.0, 20, 10, 1, 1.0, 10.0)
    assert len(found) == 3
    assert found[-1] == points[-1]
    assert sum(point.turns for point in found) == 50


@pytest.mark.parametrize(("form", "steps"), [("single", 1), ("deep", 4), ("wide", 9), ("diamond", 10)])
def test_graphs_have_as_many_steps_as_the_plan_says(form: str, steps: int) -> None:
    plan = Plan(callers=1, width=7, depth=4, artifact_bytes=10)
    made = definition(Form(form), plan)
    assert len(made.steps) == steps == steps_of(Form(form), 7, 4)
    before = graph(Form(form), 7, 4)
    for position, step in enumerate(made.steps):
        assert {*step.depends_on} <= {*list(before)[:position]}
        assert [binding.from_step for binding in step.input_artifacts] == list(step.depends_on)


def test_weights_are_read_and_wrong_ones_named() -> None:
    assert weights("start=2.5, get", Kind, "--mix") == {"start": 2.5, "get": 1.0}
    assert weights("start=1,get=0", Kind, "--mix") == {"start": 1.0}
    for wrong in ("begin=1", "start=x", "start=-1", "start=0", "start=inf"):
        with pytest.raises(PlanInvalid, match="--mix"):
            weights(wrong, Kind, "--mix")
    with pytest.raises(PlanInvalid, match="--batch-size"):
        Plan(callers=1, batch_size=1000, width=100)
    with pytest.raises(PlanInvalid, match="--rate"):
        Plan(callers=1, rate=1)


def _run(
    state: int, *, planned: str = "succeeded", ended_s: int = 102, retry_of: str = "", warm_up: bool = False
) -> workflow_pb2.WorkflowRun:
    run = workflow_pb2.WorkflowRun(
        workflow_run_id="run",
        state=cast("workflow_pb2.WorkflowRunState.ValueType", state),
        retry_of_workflow_run_id=retry_of,
        step_counts={"succeeded": 3},
        labels={LABEL: "x", PLANNED: planned} | ({WARM_UP: "yes"} if warm_up else {}),
    )
    run.created_at.FromSeconds(100)
    run.ended_at.FromSeconds(ended_s)
    return run


def test_runs_are_held_against_what_was_planned() -> None:
    pending, succeeded, failed, cancelled = 1, 4, 5, 6
    tally = Tally()
    for good in (
        _run(succeeded),
        _run(failed, planned="failed"),
        _run(succeeded, planned="failed", retry_of="another"),
        _run(cancelled, planned="cancelled"),
        _run(succeeded, planned="cancelled"),
        _run(succeeded, warm_up=True),
    ):
        tally.take(good)
    assert (tally.unplanned, tally.examples, tally.found) == (0, [], 6)
    assert tally.created_to_ended.count == 1
    assert tally.created_to_ended.at_ms(100) == pytest.approx(2000, rel=0.001)
    for bad in (_run(failed), _run(succeeded, planned="failed"), _run(cancelled)):
        tally.take(bad)
    tally.take(_run(pending))
    assert tally.unplanned == 3
    assert len(tally.examples) == 4
    assert tally.by_state == {"succeeded": 5, "failed": 2, "cancelled": 2, "open": 1}


def test_finished_runs_are_counted_between_the_first_and_the_last_measured_start() -> None:
    tally = Tally()
    assert tally.finished_per_s() == (0.0, 0.0)
    for created_s, ended_s in ((100, 101), (100, 102), (104, 109)):
        run = _run(4, ended_s=ended_s)
        run.created_at.FromSeconds(created_s)
        tally.take(run)
    assert tally.finished_per_s() == (2 / 4.5, 6 / 4.5)  # in units of half a second


def _result(**more: object) -> Result:
    result = Result("x", ("a",), CALLERS, Figures(), tally=Tally(), settled=True)
    for name, value in more.items():
        setattr(result, name, value)
    return result


def test_only_what_was_not_planned_makes_a_load_fail() -> None:
    assert _result().exit_code == 0
    faulty = _result()
    faulty.figures.fault(Kind.GET, "UNAVAILABLE", is_measured=False)
    assert faulty.exit_code == 1
    faulty.tolerated = frozenset({"UNAVAILABLE"})
    assert faulty.exit_code == 0
    assert _result(settled=False).exit_code == 1
    assert _result(tally=None).exit_code == 1
    assert _result(checked=Checked(was_run=True, violations=0)).exit_code == 0
    assert _result(checked=Checked(was_run=True, report="no answer")).exit_code == 1
    assert _result(checked=Checked(was_run=True, violations=2)).exit_code == 7


def test_a_run_that_was_answered_and_is_not_there_breaks_a_promise() -> None:
    result = _result()
    result.figures.start(0.1, 2, is_measured=True)
    assert result.tally is not None
    result.tally.take(_run(4))
    assert result.broken == ["1 runs whose start was answered are not there"]
    for _ in range(3):
        result.tally.take(_run(4))
    result.figures.unknown = 2
    assert result.broken == []
    result.figures.unknown = 1
    assert result.broken == ["2 runs are there that nobody started"]
    assert result.exit_code == 7


def test_the_picture_is_an_svg_of_two_charts(tmp_path: Path) -> None:
    figures = Figures()
    for at_s in (5.0, 10.0):
        figures.start(0.01, 1, is_measured=True)
        figures.point(at_s)
    draw(tmp_path / "load.svg", figures.points, figures.stages)
    root = ElementTree.parse(tmp_path / "load.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root) == 2
    assert "start accepted" in "".join(root.itertext())
