"""Which steps of two runs differ, and because of what: a run that is changed in one thing at a time."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_cli.compare import (
    Blob,
    Cause,
    CauseKind,
    Change,
    ChangeKind,
    Comparison,
    LoadedRun,
    Result,
    StepComparison,
    Verdict,
    compare,
)
from rara_cli.exits import Exit
from rara_cli.jsondiff import ABSENT
from rara_cli.runcompare import document, exit_of, sentence, text_lines

K, V, C = CauseKind, Verdict, ChangeKind


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def payload(value: object) -> common_pb2.Payload:
    return common_pb2.Payload(data=json.dumps(value).encode())


@dataclass(frozen=True)
class StepMade:
    """What a step came to, in few words. artifacts: by name, any text that stands for the bytes."""

    output: object = None
    artifacts: Mapping[str, str] = field(default_factory=dict)
    state: str = "SUCCEEDED"
    reason: str = ""
    version: str = "1.0.0"
    language: str = "python"
    sdk: str = "rara-python/1"
    attempt: int = 1
    step_run_id: str = ""
    of_run: str = ""
    omitted_bytes: int = 0


@dataclass(frozen=True)
class RunMade:
    """collect takes /run/input/source and an input artifact; clean takes collect's artifact; index takes a number of
    clean's output and /run/input/depth; report runs after index, and takes nothing of it."""

    run_id: str = "a"
    input: object = field(default_factory=lambda: {"source": "x", "depth": 1, "unused": 0})
    given: Mapping[str, str] = field(default_factory=lambda: {"seed": "seed"})
    version: int = 1
    state: str = "SUCCEEDED"
    failed: str = ""
    templates: Mapping[str, object] = field(default_factory=dict)
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, StepMade] = field(
        default_factory=lambda: {
            "collect": StepMade({"documents": 3}, {"corpus": "corpus"}),
            "clean": StepMade({"passages": 9, "seconds": 1}, {"documents": "documents"}),
            "index": StepMade({"mrr": 0.81}, {"index": "index"}),
            "report": StepMade({"words": 100}),
        }
    )
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def but(
        self, run_id: str = "b", /, *, of: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
    ) -> "RunMade":
        """The same, with other fields, and `of` some steps other fields."""
        steps = {name: replace(step, **(of or {}).get(name, {})) for name, step in self.steps.items()}
        return replace(self, **{"run_id": run_id, "steps": steps} | more)

    def load(self) -> LoadedRun:
        run = workflow_pb2.WorkflowRun(
            workflow_run_id=self.run_id,
            definition="flow",
            definition_version=self.version,
            state=workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{self.state}"),
            input=payload(self.input),
            input_artifacts=[_artifact(name, text) for name, text in self.given.items()],
            failed_step_run_id=f"{self.run_id}-{self.failed}" if self.failed else "",
        )
        reads = {f"{self.run_id}-{name}": frozenset(map(digest, texts)) for name, texts in self.reads.items()}
        return LoadedRun(run, self._definition(), {name: self._step(name) for name in self.steps}, reads)

    def _step(self, name: str) -> workflow_pb2.StepRun:
        made = self.steps[name]
        step = workflow_pb2.StepRun(
            step_run_id=made.step_run_id or f"{self.run_id}-{name}",
            workflow_run_id=made.of_run or self.run_id,
            step_name=name,
            state=workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{made.state}"),
            reason=made.reason,
            attempt=made.attempt,
        )
        if made.version or made.language:
            step.handler.CopyFrom(
                workflow_pb2.Handler(kind_version=made.version, executor_kind=made.language, sdk=made.sdk)
            )
        if made.omitted_bytes:
            step.output.omitted_bytes = made.omitted_bytes
        elif made.output is not None:
            step.output.CopyFrom(payload(made.output))
        step.manifest.artifacts.extend(_artifact(each, text) for each, text in made.artifacts.items())
        return step

    def _definition(self) -> workflow_pb2.Definition:
        inputs: dict[str, object] = {
            "collect": {"source": {"$ref": "/run/input/source"}},
            "clean": {},
            "index": {
                "passages": {"$ref": "/steps/clean/output/passages"},
                "depth": {"$ref": "/run/input/depth"},
            },
            "report": {},
        }
        binds = {
            "collect": [workflow_pb2.ArtifactBinding(name="seed")],
            "clean": [workflow_pb2.ArtifactBinding(name="corpus", from_step="collect")],
            "report": [],
        }
        made = workflow_pb2.Definition(definition="flow", version=self.version)
        for name in self.steps:
            fields = {"kind": f"do.{name}"} | dict(self.fields.get(name, {}))
            step = made.steps.add(step_name=name, input_artifacts=binds.get(name, []), **fields)
            step.input_template.CopyFrom(payload(self.templates.get(name, inputs.get(name, {}))))
            if name == "report":
                step.depends_on.append("index")
        return made


def _artifact(name: str, text: str) -> common_pb2.Artifact:
    return common_pb2.Artifact(name=name, digest=common_pb2.Digest(sha256=digest(text), size_bytes=len(text)))


A = RunMade()
NEVER_RAN: dict[str, Any] = {"output": None, "version": "", "language": ""}


def compared(b: RunMade, a: RunMade = A) -> Comparison:
    return compare(a.load(), b.load())


def verdicts(comparison: Comparison) -> dict[str, Verdict]:
    return {step.step_name: step.verdict for step in comparison.steps}


def step_of(comparison: Comparison, name: str) -> StepComparison:
    return next(step for step in comparison.steps if step.step_name == name)


def causes(comparison: Comparison, name: str) -> list[tuple[CauseKind, str]]:
    return [(cause.kind, cause.what) for cause in step_of(comparison, name).causes]


def test_two_runs_without_a_difference_are_the_same() -> None:
    made = compared(A.but())
    assert made.result is Result.SAME
    assert verdicts(made) == dict.fromkeys(("collect", "clean", "index", "report"), V.SAME)
    assert sentence(made) == "same: 4 steps with equal input, definition, code and results"
    assert exit_of(made) is Exit.OK


def test_a_run_is_the_same_as_itself_even_while_it_runs() -> None:
    running = A.but("a", state="RUNNING", of={"index": {"state": "RUNNING", "output": None}})
    made = compared(running, running)
    assert (made.result, sentence(made)) == (Result.SAME, "same: A and B are one run")
    assert len(text_lines(made)) == 4


def test_attempts_durations_and_executors_are_no_difference() -> None:
    made = compared(A.but(of={"clean": {"attempt": 4}}))
    assert made.result is Result.SAME
    assert document(made)["steps"][1]["b"]["attempt"] == 4  # type: ignore[index]


# ---------------------------------------------------------------- each kind of cause


def test_an_input_that_changes_a_result_is_its_cause_and_what_follows_is_told_apart() -> None:
    b = A.but(
        input={"source": "y", "depth": 1, "unused": 5},
        of={
            "collect": {"output": {"documents": 4}, "artifacts": {"corpus": "corpus two"}},
            "clean": {"output": {"passages": 12, "seconds": 1}, "artifacts": {"documents": "documents two"}},
            "index": {"output": {"mrr": 0.83}, "artifacts": {"index": "index two"}},
        },
    )
    made = compared(b)
    assert [(step.step_name, step.verdict) for step in made.steps] == [
        ("collect", V.CAUSE),
        ("clean", V.CONSEQUENCE),
        ("index", V.CONSEQUENCE),
        ("report", V.SAME),
    ]
    collect, clean, index, _ = made.steps
    assert collect.causes == (Cause(K.INPUT, "/source", "x", "y"),)
    assert clean.causes == (Cause(K.UPSTREAM, "collect", through=("artifact corpus",)),)
    assert index.causes == (Cause(K.UPSTREAM, "clean", through=("output /passages",)),)
    assert collect.changes == (
        Change(C.OUTPUT, "/documents", 3, 4),
        Change(C.ARTIFACT, "corpus", Blob(digest("corpus"), 6), Blob(digest("corpus two"), 10)),
    )
    assert [(cause.kind, cause.what) for cause in made.given] == [(K.INPUT, "/source"), (K.INPUT, "/unused")]
    assert sentence(made) == (
        '3 of 4 steps differ: collect because of input /source "x" → "y"; clean and index follow from that.'
    )
    assert exit_of(made) is Exit.DIFFERENT
    (change,) = document(made)["steps"][2]["changes"][:1]  # type: ignore[index]
    assert change == {"kind": "output", "what": "/mrr", "a": 0.81, "b": 0.83, "delta": 0.02}


def test_an_input_artifact_of_the_run_is_a_cause() -> None:
    made = compared(A.but(given={"seed": "another"}, of={"collect": {"output": {"documents": 9}}}))
    assert causes(made, "collect") == [(K.INPUT_ARTIFACT, "seed")]
    assert verdicts(made)["collect"] is V.CAUSE
    assert "collect because of input artifact seed" in sentence(made)


def test_a_missing_input_artifact_is_a_cause_too() -> None:
    made = compared(A.but(given={}, of={"collect": {"output": {"documents": 9}}}))
    (cause,) = step_of(made, "collect").causes
    assert (cause.a, cause.b) == (Blob(digest("seed"), 4), ABSENT)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kind": "do.other"}, "/kind"),
        ({"kind_version": "2"}, "/kind_version"),
        ({"executor_kind": "go"}, "/executor_kind"),
        ({"required_labels": {"gpu": "a100"}}, "/required_labels/gpu"),
        ({"retry": workflow_pb2.RetryPolicy(max_attempts=7)}, "/retry"),
        ({"secrets": {"key": common_pb2.SecretRef(provider="env", name="KEY")}}, "/secrets/key"),
    ],
)
def test_a_field_of_the_definition_is_a_cause(fields: dict[str, Any], what: str) -> None:
    made = compared(A.but(version=2, fields={"clean": fields}, of={"clean": {"output": {"passages": 1}}}))
    assert causes(made, "clean") == [(K.DEFINITION, what)]
    assert causes(made, "collect") == []
    assert (made.given[0].a, made.given[0].b) == ("flow v1", "flow v2")


def test_a_constant_in_a_template_is_a_cause_by_its_path() -> None:
    one = A.but("a", templates={"clean": {"mode": {"fast": True, "size": 4}}})
    other = A.but(version=2, templates={"clean": {"mode": {"fast": True, "size": 8}}},
                  of={"clean": {"output": {"passages": 1}}})  # fmt: skip
    made = compared(other, one)
    (cause,) = step_of(made, "clean").causes
    assert cause == Cause(K.DEFINITION, "/input_template/mode/size", 4, 8)


def test_another_definition_with_equal_steps_changes_nothing_in_them() -> None:
    made = compared(A.but(version=2))
    assert made.result is Result.SAME_RESULT
    assert set(verdicts(made).values()) == {V.SAME}
    assert sentence(made) == (
        'same results in all 4 steps, although this differs: definition "flow v1" → "flow v2"'
    )


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"version": "1.1.0"}, Cause(K.CODE, "version", "1.0.0", "1.1.0")),
        ({"language": "go", "sdk": "rara-go/1"}, Cause(K.CODE, "language", "python", "go")),
        ({"sdk": "rara-python/2"}, Cause(K.CODE, "sdk", "rara-python/1", "rara-python/2")),
    ],
)
def test_the_code_that_ran_is_a_cause(fields: dict[str, Any], cause: Cause) -> None:
    made = compared(A.but(of={"clean": fields | {"output": {"passages": 1}}}))
    assert step_of(made, "clean").causes == (cause,)
    assert verdicts(made)["clean"] is V.CAUSE


def test_code_that_is_not_known_of_one_run_is_not_compared() -> None:
    made = compared(A.but(of={"clean": {"version": "", "language": "", "output": {"passages": 1}}}))
    assert step_of(made, "clean").causes == ()
    assert verdicts(made)["clean"] is V.UNEXPLAINED


def test_an_artifact_that_was_read_without_being_named_is_a_cause() -> None:
    a = A.but("a", reads={"clean": frozenset({"lexicon"})})
    b = A.but(reads={"clean": frozenset({"lexicon two"})}, of={"clean": {"output": {"passages": 1}}})
    made = compared(b, a)
    assert causes(made, "clean") == [(K.READ, digest("lexicon")), (K.READ, digest("lexicon two"))]
    assert f"artifact {digest('lexicon')[:12]} read in A only" in "\n".join(text_lines(made))


def test_one_that_the_run_itself_made_is_its_maker_s_consequence() -> None:
    a = A.but("a", reads={"report": frozenset({"corpus"})})
    b = A.but(
        reads={"report": frozenset({"corpus two"})},
        given={"seed": "another"},
        of={"collect": {"artifacts": {"corpus": "corpus two"}}, "report": {"output": {"words": 7}}},
    )
    made = compared(b, a)
    assert step_of(made, "report").causes == (Cause(K.UPSTREAM, "collect", through=("artifact corpus",)),)
    assert verdicts(made)["report"] is V.CONSEQUENCE


def test_a_result_that_nothing_explains_is_called_so() -> None:
    made = compared(A.but(of={"index": {"output": {"mrr": 0.5}}}))
    assert verdicts(made)["index"] is V.UNEXPLAINED
    assert sentence(made) == ("1 of 4 steps differ: index in spite of equal input, definition and code.")


# ---------------------------------------------------------------- what follows from what


def test_only_what_a_step_takes_of_another_counts() -> None:
    """clean's output differs in its seconds, which nobody takes."""
    made = compared(A.but(of={"clean": {"output": {"passages": 9, "seconds": 2}}}))
    assert verdicts(made) == {
        "clean": V.UNEXPLAINED, "collect": V.SAME, "index": V.SAME, "report": V.SAME,
    }  # fmt: skip


def test_a_step_that_only_runs_after_another_one_follows_it_where_nothing_else_explains_it() -> None:
    b = A.but(
        input={"source": "x", "depth": 2, "unused": 0},
        of={"index": {"output": {"mrr": 0.9}}, "report": {"output": {"words": 120}}},
    )
    made = compared(b)
    assert step_of(made, "report").causes == (Cause(K.UPSTREAM, "index", through=("its end",)),)
    assert verdicts(made)["report"] is V.CONSEQUENCE


def test_an_input_that_already_made_a_step_before_differ_makes_no_second_cause() -> None:
    whole = {"options": {"$ref": "/run/input"}}
    a = A.but(
        "a", templates={"collect": whole, "report": whole | {"mrr": {"$ref": "/steps/index/output/mrr"}}}
    )
    b = a.but(
        input={"source": "x", "depth": 2, "unused": 0},
        of={"index": {"output": {"mrr": 0.9}}, "report": {"output": {"words": 120}}},
    )
    made = compared(b, a)
    assert verdicts(made) == {
        "index": V.CAUSE, "report": V.CONSEQUENCE, "collect": V.SAME_RESULT, "clean": V.SAME,
    }  # fmt: skip
    assert causes(made, "report") == [(K.INPUT, "/depth"), (K.UPSTREAM, "index")]
    assert "same result, although something differs: collect (input /depth 1 → 2)" in text_lines(made)


def test_a_second_cause_of_its_own_makes_a_consequence_a_cause() -> None:
    b = A.but(
        input={"source": "x", "depth": 2, "unused": 0},
        given={"seed": "another"},
        of={
            "collect": {"artifacts": {"corpus": "corpus two"}},
            "clean": {"output": {"passages": 1}},
            "index": {"output": {"mrr": 0.1}},
        },
    )
    made = compared(b)
    assert verdicts(made)["index"] is V.CAUSE
    assert causes(made, "index") == [(K.INPUT, "/depth"), (K.UPSTREAM, "clean")]
    assert verdicts(made)["clean"] is V.CONSEQUENCE


def test_steps_whose_definitions_turn_an_edge_around_still_compare() -> None:
    a = A.but("a", templates={"clean": {"n": {"$ref": "/steps/report/output/words"}}})
    b = A.but(version=2, of={"clean": {"output": {"passages": 1}}})
    made = compared(b, a)
    assert causes(made, "clean") == [(K.DEFINITION, "/input_template/n")]


# ---------------------------------------------------------------- states


def test_a_failure_and_what_it_takes_along() -> None:
    b = A.but(
        state="FAILED",
        failed="index",
        of={
            "index": {"state": "TERMINAL_FAILED", "reason": "OUT_OF_MEMORY", "output": None, "artifacts": {}},
            "report": {
                "state": "CANCELLED",
                "reason": "UPSTREAM_FAILED",
                "output": None,
                "version": "",
                "language": "",
            },
        },
    )
    made = compared(b)
    assert verdicts(made) == {
        "index": V.UNEXPLAINED, "report": V.CONSEQUENCE, "collect": V.SAME, "clean": V.SAME,
    }  # fmt: skip
    assert step_of(made, "index").changes == (
        Change(C.STATE, "", "succeeded", "terminal_failed OUT_OF_MEMORY"),
    )
    assert step_of(made, "report").causes == (Cause(K.UPSTREAM, "index", through=("its failure",)),)


def test_a_sibling_that_failed_fast_is_named() -> None:
    b = A.but(
        state="FAILED",
        failed="clean",
        of={
            "clean": {"state": "TERMINAL_FAILED", "reason": "BAD", "output": None, "artifacts": {}},
            "index": {"state": "CANCELLED", "reason": "UPSTREAM_FAILED", "output": None, "artifacts": {}},
            "report": {"state": "CANCELLED", "reason": "SIBLING_FAILED", "output": None},
        },
    )
    made = compared(b)
    assert step_of(made, "report").causes == (Cause(K.UPSTREAM, "clean", through=("its failure",)),)
    assert verdicts(made)["index"] is V.CONSEQUENCE


@pytest.mark.parametrize("reason", ["CANCELLED", "DEADLINE_EXCEEDED", "NO_CAPABLE_EXECUTOR"])
def test_what_was_ended_from_outside_says_by_what(reason: str) -> None:
    b = A.but(state="CANCELLED", of={"report": {"state": "CANCELLED", "reason": reason, "output": None}})
    made = compared(b)
    assert step_of(made, "report").causes == (Cause(K.ENDED, reason, "succeeded", f"cancelled {reason}"),)
    assert sentence(made) == f"1 of 4 steps differ: report because of {reason}."
    assert verdicts(made)["report"] is V.CAUSE


def test_equal_failures_are_the_same() -> None:
    failed: dict[str, Any] = {"state": "TERMINAL_FAILED", "reason": "BAD", "output": None, "artifacts": {}}
    one = A.but("a", state="FAILED", of={"report": failed})
    made = compared(one.but("b"), one)
    assert made.result is Result.SAME


def test_an_unfinished_run_is_compared_as_far_as_it_is() -> None:
    b = A.but(
        state="RUNNING",
        of={
            "index": {"state": "RUNNING", "output": None, "artifacts": {}},
            "report": NEVER_RAN | {"state": "PENDING"},
        },
    )
    made = compared(b)
    assert verdicts(made) == {
        "index": V.OPEN, "report": V.OPEN, "collect": V.SAME, "clean": V.SAME,
    }  # fmt: skip
    assert made.result is Result.SAME_SO_FAR
    assert sentence(made) == "same so far: 2 of 4 steps have not ended in both"
    assert exit_of(made) is Exit.STILL_GOING
    assert "succeeded → running" in "\n".join(text_lines(made))


def test_a_difference_in_what_has_ended_counts_although_the_rest_runs() -> None:
    b = A.but(
        state="RUNNING",
        of={"clean": {"output": {"passages": 1}}, "report": {"state": "RUNNING", "output": None}},
    )
    assert compared(b).result is Result.DIFFERENT


# ---------------------------------------------------------------- which steps


def test_steps_of_one_run_alone_are_told() -> None:
    steps = {name: step for name, step in A.steps.items() if name != "report"} | {"extra": StepMade({"n": 1})}
    made = compared(A.but(version=2, steps=steps))
    assert verdicts(made)["report"] is V.ONLY_A
    assert verdicts(made)["extra"] is V.ONLY_B
    assert sentence(made) == "2 of 5 steps differ: report is only in A; extra is only in B."
    by_name = {step["step_name"]: step for step in document(made)["steps"]}  # type: ignore[attr-defined]
    assert ("a" in by_name["extra"], "b" in by_name["extra"]) == (False, True)


def test_a_reused_step_is_one_and_the_same() -> None:
    """A retry: collect and clean are taken from the first run, the rest ran again under another version."""
    one = A.but(
        "a", state="FAILED", of={"index": {"state": "TERMINAL_FAILED", "reason": "BAD", "output": None}}
    )
    retry = A.but(
        of={
            "collect": {"step_run_id": "a-collect", "of_run": "a"},
            "clean": {"step_run_id": "a-clean", "of_run": "a"},
            "index": {"version": "1.0.1"},
        },
        input={"source": "other", "depth": 1, "unused": 0},
    )
    made = compared(retry, one)
    assert verdicts(made)["collect"] is V.SAME
    assert step_of(made, "collect").causes == ()
    assert causes(made, "index") == [(K.CODE, "version")]
    by_name = {step["step_name"]: step for step in document(made)["steps"]}  # type: ignore[attr-defined]
    assert [by_name["collect"][side]["is_reused"] for side in ("a", "b")] == [False, True]


# ---------------------------------------------------------------- outputs that are not JSON, large, absent


def test_outputs_that_were_left_out_are_compared_by_size_and_said_to_be_so() -> None:
    large: dict[str, Any] = {"index": {"output": None, "omitted_bytes": 9000}}
    other: dict[str, Any] = {"index": {"output": None, "omitted_bytes": 9001}}
    one = A.but("a", of=large)
    equal, longer = compared(one.but("b"), one), compared(one.but("b", of=other), one)
    assert verdicts(equal)["index"] is V.SAME
    assert "not compared, since their outputs are large: index" in text_lines(equal)
    assert step_of(equal, "index").unread_bytes == 9000
    assert verdicts(longer)["index"] is V.UNEXPLAINED
    assert "output 9,000 bytes left out → 9,001 bytes left out" in "\n".join(text_lines(longer))


def test_an_output_that_is_absent_differs_from_null() -> None:
    made = compared(A.but(of={"report": {"output": None}}))
    assert step_of(made, "report").changes == (Change(C.OUTPUT, "", {"words": 100}, ABSENT),)


def test_many_differences_are_counted_and_few_are_shown() -> None:
    one = A.but("a", of={"report": {"output": {f"n{i}": i for i in range(100)}}})
    other = A.but(of={"report": {"output": {f"n{i}": i + 1 for i in range(100)}}})
    made = compared(other, one)
    step = step_of(made, "report")
    assert (len(step.changes), step.more) == (20, 80)
    assert "… and 94 more" in "\n".join(text_lines(made))


@pytest.mark.parametrize("name", ["collect", "clean", "index", "report"])
def test_artifacts_are_matched_by_name(name: str) -> None:
    made = compared(A.but(of={name: {"artifacts": {"other": "bytes"}}}))
    had = A.steps[name].artifacts
    changes = {change.what: (change.a, change.b) for change in step_of(made, name).changes}
    assert changes == {each: (Blob(digest(text), len(text)), ABSENT) for each, text in had.items()} | {
        "other": (ABSENT, Blob(digest("bytes"), 5))
    }


def test_a_step_without_a_template_takes_the_whole_input() -> None:
    def whole(made: RunMade) -> LoadedRun:
        loaded = made.load()
        for step in loaded.definition.steps:
            if step.step_name == "collect":
                step.ClearField("input_template")
        return loaded

    b = A.but(input={"source": "x", "depth": 3, "unused": 0}, of={"collect": {"output": {"documents": 1}}})
    made = compare(whole(A), whole(b))
    assert causes(made, "collect") == [(K.INPUT, "/depth")]


# ---------------------------------------------------------------- size, and what is shown


def _wide(run_id: str, count: int, change: Callable[[int], object]) -> LoadedRun:
    """A chain of steps, each of which takes the output of the one before."""
    names = [f"s{n}" for n in range(count)]
    steps = {name: StepMade({"n": change(n)}) for n, name in enumerate(names)}
    templates = {
        name: {"n": {"$ref": f"/steps/{before}/output/n"}} for before, name in itertools.pairwise(names)
    }
    return RunMade(run_id, steps=steps, templates=templates).load()


def test_a_chain_of_ten_thousand_steps_has_one_cause() -> None:
    a = _wide("a", 10_000, lambda n: n)
    b = _wide("b", 10_000, lambda n: n + (n >= 5_000))
    made = compare(a, b)
    assert len(made.differing) == 5_000
    assert [step.step_name for step in made.of(V.UNEXPLAINED)] == ["s5000"]
    assert len(made.of(V.CONSEQUENCE)) == 4_999
    lines = text_lines(made, limit=50)
    assert len(lines) < 70
    assert lines[-1] == (
        "5,000 of 10,000 steps differ: s5000 in spite of equal input, definition and code;"
        " s5001, s5002, s5003, s5004, s5005 and 4,994 more follow from that."
    )


def test_the_table_has_the_causes_first_and_the_sentence_last() -> None:
    b = A.but(
        input={"source": "x", "depth": 2, "unused": 0},
        of={
            "index": {"output": {"mrr": 0.83}, "artifacts": {"index": "index two"}, "attempt": 2},
            "report": {"output": {"words": 120}},
        },
    )
    lines = text_lines(compared(b), is_wide=True)
    assert (
        lines
        == f"""\
A  a  flow v1  succeeded
B  b  flow v1  succeeded

STEP    IS           BECAUSE OF          WHAT DIFFERS                                TOOK  ATTEMPTS  RAN
index   cause        input /depth 1 → 2  output /mrr 0.81 → 0.83 (+0.02)                   1 → 2     1.0.0 in python
                                         artifact index {digest("index")[:12]} → {digest("index two")[:12]}
report  consequence  index: its end      output /words 100 → 120 (+20)                     1         1.0.0 in python

same in all: collect and clean
2 of 4 steps differ: index because of input /depth 1 → 2; report follows from that.
""".splitlines()
    )


def test_the_document_says_all_of_it() -> None:
    b = A.but(input={"source": "x", "depth": 2, "unused": 0}, of={"index": {"output": {"mrr": 0.83}}})
    made: Any = json.loads(json.dumps(document(compared(b))))
    assert made["result"] == "different"
    assert made["a"] == {
        "workflow_run_id": "a", "definition": "flow", "definition_version": 1, "state": "succeeded", "seconds": None,
    }  # fmt: skip
    assert made["given"] == [{"kind": "input", "what": "/depth", "a": 1, "b": 2}]
    first = made["steps"][0]
    assert (first["step_name"], first["verdict"]) == ("index", "cause")
    assert first["causes"] == [{"kind": "input", "what": "/depth", "a": 1, "b": 2}]
    assert first["b"] == {
        "step_run_id": "b-index", "state": "succeeded", "reason": "", "attempt": 1, "seconds": None,
        "is_reused": False, "ran_version": "1.0.0", "ran_in": "python", "sdk": "rara-python/1",
    }  # fmt: skip


def test_what_comes_from_runs_cannot_drive_a_terminal() -> None:
    b = A.but(input={"source": "\x1b[2J", "depth": 1, "unused": 0}, of={"collect": {"output": {"\x1bx": 1}}})
    assert "\x1b" not in "\n".join(text_lines(compared(b)))
