"""The definitions of a load: one for each form of graph, all steps of one kind, so that one executor serves all."""

from typing import Final

from rara.v1 import workflow_pb2
from rara_client.definitions import definition_from
from rara_testing.load import KIND

from rara_load.plan import Form, Plan

_DIAMONDS: Final = 3
_RETRY: Final = {
    "max_attempts": 20,  # more than faults beside the load can spend, so that every other ending is a finding
    "initial_backoff": "0.05s",
    "max_backoff": "1s",
}


def graph(form: Form, width: int, depth: int) -> dict[str, tuple[str, ...]]:
    """Each step and those before it, in an order in which they can run."""
    match form:
        case Form.SINGLE:
            return {"only": ()}
        case Form.DEEP:
            return {f"s{n}": (f"s{n - 1}",) if n else () for n in range(depth)}
        case Form.WIDE:
            middle = tuple(f"s{n}" for n in range(width))
            return {"first": (), **dict.fromkeys(middle, ("first",)), "last": middle}
        case Form.DIAMOND:
            found: dict[str, tuple[str, ...]] = {"join0": ()}
            for n in range(_DIAMONDS):
                sides = f"left{n}", f"right{n}"
                found |= {**dict.fromkeys(sides, (f"join{n}",)), f"join{n + 1}": sides}
            return found


def definition(form: Form, plan: Plan) -> workflow_pb2.Definition:
    return definition_from(
        {
            "definition": f"load-{form}",
            "steps": [
                _step(name, before, with_artifacts=bool(plan.artifact_bytes))
                for name, before in graph(form, plan.width, plan.depth).items()
            ],
        }
    )


def _step(name: str, before: tuple[str, ...], *, with_artifacts: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "step_name": name,
        "kind": KIND,
        "depends_on": list(before),
        "retry": dict(_RETRY),
        "cancel_grace": "2s",
    }
    if with_artifacts:
        found["input_artifacts"] = [
            {"name": f"from-{step}", "from_step": step, "from_name": "out"} for step in before
        ]
    return found
