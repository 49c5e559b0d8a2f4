"""The shapes of the load's runs: their definitions, and what each of their steps must give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rara.v1 import workflow_pb2
from rara_client.definitions import definition_from

from rara_chaos.operations import value_of


@dataclass(frozen=True, slots=True)
class Step:
    kind: str
    after: tuple[str, ...] = ()
    executor_kind: str = ""  # empty: any


@dataclass(frozen=True, slots=True)
class Shape:
    """A definition. fails: its first run does, by a hopeless step; a retry of that run succeeds."""

    name: str
    steps: Mapping[str, Step]
    on_failure: str = "fail_fast"
    fails: bool = False
    weight: int = 1
    retry: Mapping[str, object] = field(
        default_factory=lambda: {
            "max_attempts": 60,  # more than the faults of a run can spend, so that every failure is a finding
            "initial_backoff": "0.05s",
            "max_backoff": "0.3s",
        }
    )

    def definition(self) -> workflow_pb2.Definition:
        return definition_from(
            {
                "definition": self.name,
                "on_failure": self.on_failure,
                "steps": [self._step(name, step) for name, step in self.steps.items()],
            }
        )

    def _step(self, name: str, step: Step) -> dict[str, object]:
        template: dict[str, object] = {"ledger": {"$ref": "/run/input/ledger"}}
        if step.after:
            template["parts"] = [{"$ref": f"/steps/{parent}/output/value"} for parent in step.after]
        else:
            template["number"] = {"$ref": "/run/input/number"}
        document: dict[str, object] = {
            "step_name": name,
            "kind": step.kind,
            "executor_kind": step.executor_kind,
            "retry": dict(self.retry),
            "cancel_grace": "0.5s",
        }
        if step.kind == "chaos.use":
            template["made_from"] = {"$ref": "/run/input/number"}
            document["input_artifacts"] = [{"name": "content", "from_step": step.after[0]}]
        return document | {"depends_on": list(step.after), "input_template": template}

    def values(self, number: int) -> dict[str, int]:
        """What each step makes of the run's number."""
        found: dict[str, int] = {}
        for name, step in self.steps.items():  # in an order in which they can run
            given = sum(found[parent] for parent in step.after) if step.after else number
            found[name] = value_of(name, given)
        return found


SHAPES = (
    Shape("chaos-single", {"a": Step("chaos.work")}, weight=3),
    Shape(
        "chaos-chain",
        {"a": Step("chaos.work"), "b": Step("chaos.block", ("a",)), "c": Step("chaos.flaky", ("b",))},
        weight=3,
    ),
    Shape(
        "chaos-diamond",
        {
            "a": Step("chaos.work"),
            "b": Step("chaos.work", ("a",)),
            "c": Step("chaos.block", ("a",)),
            "d": Step("chaos.flaky", ("a",)),
            "e": Step("chaos.work", ("a",)),
            "f": Step("chaos.work", ("b", "c", "d", "e")),
        },
        weight=3,
    ),
    Shape(
        "chaos-fail-fast",
        {
            "a": Step("chaos.work"),
            "b": Step("chaos.hopeless", ("a",)),
            "c": Step("chaos.slow", ("a",)),
            "d": Step("chaos.work", ("c",)),
        },
        fails=True,
    ),
    Shape(
        "chaos-continue",
        {"a": Step("chaos.work"), "b": Step("chaos.hopeless", ("a",)), "c": Step("chaos.block", ("a",))},
        on_failure="continue",
        fails=True,
    ),
    Shape("chaos-artifacts", {"a": Step("chaos.make"), "b": Step("chaos.use", ("a",))}, weight=4),
    Shape("chaos-parts", {"a": Step("chaos.parts"), "b": Step("chaos.use", ("a",))}, weight=3),
    Shape("chaos-slow", {"a": Step("chaos.slow")}, weight=2),
)
BY_NAME = {shape.name: shape for shape in SHAPES}


def alternating(shape: Shape, executor_kinds: Sequence[str]) -> Shape:
    """The shape with each step on another kind of executor than the steps before it; the first step has the first."""
    depths: dict[str, int] = {}
    for name, step in shape.steps.items():
        depths[name] = 1 + max((depths[parent] for parent in step.after), default=-1)
    steps = {
        name: replace(step, executor_kind=executor_kinds[depths[name] % len(executor_kinds)])
        for name, step in shape.steps.items()
    }
    return replace(shape, name=f"{shape.name}-from-{executor_kinds[0]}", steps=steps)


# Runs for a stack with executors in both languages: some steps are of one, the others do not mind.
MIXED_SHAPES = (
    *SHAPES,
    *(
        alternating(shape, kinds)
        for shape in SHAPES
        if len(shape.steps) > 1
        for kinds in (("python", "go"), ("go", "python"))
    ),
)
