"""The chaos runner's verdict finds what it is there to find."""

import json
from pathlib import Path

from rara_chaos.figures import Figures
from rara_chaos.ledger import Entry, What, read
from rara_chaos.load import Confirmed
from rara_chaos.report import Report
from rara_chaos.schedule import Kind
from rara_chaos.shapes import BY_NAME, MIXED_SHAPES
from rara_chaos.verdict import (
    Activity,
    Attempt,
    Verdict,
    activities,
    out_of_bounds,
    overlaps,
    wrong_effects,
    wrong_values,
)


def entry(what: What, token: int, at_s: float) -> Entry:
    return Entry(what, "key", "step", token, 1, 1, at_s)


def of(*entries: Entry) -> dict[int, Activity]:
    return activities(entries)["key"]


def test_attempts_one_after_the_other_are_right() -> None:
    found = of(
        entry(What.START, 1, 1.0),
        entry(What.EFFECT, 1, 2.0),
        entry(What.START, 5, 3.0),
        entry(What.EFFECT, 5, 4.0),
        entry(What.END, 5, 4.1),
    )
    assert overlaps("key", found) == []
    assert wrong_effects("key", found, 5) == []
    assert wrong_effects("key", found, None) == []


def test_a_handler_at_work_after_the_next_began_is_found() -> None:
    found = of(entry(What.START, 1, 1.0), entry(What.START, 5, 3.0), entry(What.TICK, 1, 3.2))
    assert overlaps("key", found) == ["key: token 1 was at work 0.20 s after token 5 had begun"]


def test_a_handler_that_outlives_two_successors_is_found() -> None:
    found = of(
        entry(What.START, 1, 1.0),
        entry(What.TICK, 1, 9.0),
        entry(What.START, 5, 3.0),
        entry(What.START, 6, 8.0),
    )
    assert len(overlaps("key", found)) == 2


def test_a_last_word_of_a_frozen_executor_is_one_of_before() -> None:
    entries = [entry(What.START, 1, 1.0), entry(What.START, 5, 8.0), entry(What.END, 1, 9.1)]
    assert len(overlaps("key", activities(entries)["key"])) == 1
    assert overlaps("key", activities(entries, [(2.0, 9.0)])["key"]) == []
    assert len(overlaps("key", activities(entries, [(2.0, 8.5)])["key"])) == 1


def test_a_token_that_starts_twice_is_found() -> None:
    found = of(entry(What.START, 1, 1.0), entry(What.START, 1, 1.5))
    assert overlaps("key", found) == ["key: the handler of token 1 was started 2 times"]


def test_work_outside_of_its_attempt_is_found() -> None:
    attempt = Attempt("step", 1, 7, "executor", "python", "", 100.0, 101.0, 101.5, 105.0)

    def judged(first_s: float, last_s: float, token: int = 7) -> int:
        return len(out_of_bounds([attempt], {token: Activity(first_s, last_s)}, 100.0))

    assert judged(1.2, 4.9) == 0
    assert judged(0.5, 4.9) == 1
    assert judged(1.2, 5.5) == 1
    assert judged(1.2, 4.9, token=8) == 1


def test_effects_that_should_not_be_are_found() -> None:
    found = of(
        entry(What.START, 1, 1.0),
        entry(What.EFFECT, 1, 2.0),
        entry(What.START, 2, 3.0),
        entry(What.EFFECT, 2, 4.0),
    )
    assert wrong_effects("key", found, 1) == ["key: token 2 did the effect again that token 1 had recorded"]
    assert wrong_effects("key", found, 3) == ["key: the recorded effect of token 3 was never done"]
    twice = of(entry(What.START, 1, 1.0), entry(What.EFFECT, 1, 2.0), entry(What.EFFECT, 1, 2.1))
    assert wrong_effects("key", twice, 1) == ["key: token 1 did the effect 2 times"]


def test_a_wrong_result_is_found() -> None:
    run = Confirmed("run", BY_NAME["chaos-chain"], 4)
    right = {name: {"value": value} for name, value in run.shape.values(4).items()}
    assert wrong_values(run, right) == []
    assert len(wrong_values(run, right | {"b": {"value": 1}})) == 1
    assert len(wrong_values(run, right | {"b": {}})) == 1


def test_every_shape_has_a_definition() -> None:
    for shape in MIXED_SHAPES:
        assert [step.step_name for step in shape.definition().steps] == list(shape.steps)
        assert set(shape.values(3)) == set(shape.steps)


def test_a_ledger_that_was_never_begun_is_empty(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none")) == []


def test_steps_of_mixed_shapes_take_turns() -> None:
    diamond = {shape.name: shape for shape in MIXED_SHAPES}["chaos-diamond-from-go"]
    kinds = {step.step_name: step.executor_kind for step in diamond.definition().steps}
    assert kinds == dict.fromkeys("af", "go") | dict.fromkeys("bcde", "python")
    assert diamond.values(5) == BY_NAME["chaos-diamond"].values(5)


def test_an_executor_that_was_spared_makes_no_good_report() -> None:
    faults = dict.fromkeys(Kind, 1)

    def spared(attempts: dict[str, int], hit: dict[str, int]) -> list[str]:
        verdict = Verdict(attempts_by_kind=attempts, blobs_verified=1, steps=1)
        report = Report(1, 60, faults, verdict, {}, Figures(), [], hit)
        assert report.is_good == (not report.spared)
        return report.spared

    assert spared({"go": 5, "python": 5}, {"go": 1, "python": 3}) == []
    assert spared({"go": 5, "python": 5}, {"go": 0, "python": 4}) == ["go"]
    assert spared({"python": 5}, {"go": 2, "python": 2}) == ["go"]


def test_a_run_without_a_blob_that_was_verified_is_not_good() -> None:
    report = Report(1, 60, dict.fromkeys(Kind, 1), Verdict(steps=1), {}, Figures(), [], {})
    assert not report.is_good
    assert json.loads(report.json())["blobs_verified"] == 0


def test_a_run_in_which_nothing_was_done_is_not_good() -> None:
    faults = dict.fromkeys(Kind, 1)
    done, nothing = (
        Report(1, 60, faults, Verdict(steps=steps), {}, Figures(), [], {}, "address", wants_blobs=False)
        for steps in (1, 0)
    )
    assert done.is_good
    assert not nothing.is_good


def test_only_what_was_dealt_has_to_be_injected() -> None:
    verdict = Verdict(steps=1, blobs_verified=1)
    dealt = [Kind.POSTGRES_FROZEN, Kind.DISK_FULL]
    report = Report(1, 60, {Kind.DISK_FULL: 1}, verdict, {}, Figures(), [], {}, "compose", dealt)
    assert report.never == [Kind.POSTGRES_FROZEN]
    assert json.loads(report.json())["faults"] == {"postgres_frozen": 0, "disk_full": 1}
