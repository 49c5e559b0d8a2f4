"""The parts of the documents that are made from code.

A region of a document stands between `<!-- made: NAME -->` and `<!-- end -->`. `python -m support.documents`, run in
the folder `tests`, writes them all anew; tests hold them to the code.
"""

import ast
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings
from rara_executor.settings import Settings as ExecutorSettings
from rara_scheduler.domain import run, step
from rara_scheduler.domain.tokens import Role
from rara_scheduler.settings import Settings as SchedulerSettings
from rara_scheduler.telemetry.catalogue import METRICS
from rara_scheduler.transport import roles

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)

_REGION = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(document: str) -> str:
    """The text with every region made anew. Raises KeyError for a region that nobody makes."""

    def region(match: re.Match[str]) -> str:
        return f"{match[1]}\n{MADE[match['name']]()}\n{match[3]}"

    return _REGION.sub(region, document)


# ---------------------------------------------------------------- states


def states_table(
    transitions: Mapping[tuple[State, Event], State], states: type[State], events: type[Event]
) -> str:
    """A row per state, a column per event; a cell names the state that follows."""
    lines = [
        "| In | " + " | ".join(f"`{event}`" for event in events) + " |",
        "| --- |" + " --- |" * len(list(events)),
    ]
    for state in states:
        cells = [transitions.get((state, event)) for event in events]
        shown = " | ".join(f"`{cell}`" if cell else "" for cell in cells)
        final = "" if any(cells) else " (final)"
        lines.append(f"| `{state}`{final} | {shown} |")
    return "\n".join(lines) + "\n"


def states_diagram(transitions: Mapping[tuple[State, Event], State], states: type[State]) -> str:
    """A Mermaid state diagram."""
    first = next(iter(states))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {state} --> {to}: {event}" for (state, event), to in transitions.items()]
    open_states = {state for state, _ in transitions}
    lines += [f"    {state} --> [*]" for state in states if state not in open_states]
    return "\n".join([*lines, "```"]) + "\n"


# ---------------------------------------------------------------- settings


def _docstrings(model: type[BaseSettings]) -> dict[str, str]:
    """The text below each field of the class, by the field's name."""
    module = sys.modules[model.__module__]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == model.__name__).body
    found = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _size(value: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit and value % unit == 0:
            return f" ({value // unit} {name})"
    return ""


def _default(name: str, value: Any, factory: Callable[..., Any] | None) -> str:
    if factory is not None:
        made = {
            "executor_name": "the host's name",
            "executor_dir": "a folder of the user's among temporary files",
        }
        return made.get(name, "none")
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, int):
        return f"`{value}`" + (_size(value) if name.endswith("bytes") else "")
    return "none" if value in (None, "", ()) else f"`{value}`"


def _bounds(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    parts = []
    nested = [extra for arg in get_args(annotation) for extra in getattr(arg, "__metadata__", ())]
    for extra in [*metadata, *nested]:
        for inner in getattr(extra, "metadata", [extra]):
            for bound, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
                limit = getattr(inner, bound, None)
                if limit is not None:
                    parts.append(f"{sign} {limit}")
            if getattr(inner, "max_length", None) is not None:
                parts.append(f"≤ {inner.max_length} characters")
    return ", ".join(parts)


def settings_table(model: type[BaseSettings]) -> str:
    """A row per setting. Raises KeyError for one that its class does not explain."""
    texts = _docstrings(model)
    lines = ["| Variable | Default | Allowed | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        default = _default(name, field.default, field.default_factory)
        bounds = _bounds(field.annotation, field.metadata)
        lines.append(f"| `RARA_{name.upper()}` | {default} | {bounds} | {texts[name]} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- telemetry


def metrics_table() -> str:
    """A row per metric of the scheduler."""
    lines = ["| Metric | Type | Unit | Labels | Meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.shape} | `{metric.unit}` | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


def roles_table() -> str:
    """A row for each method of a scheduler's port, by service."""
    methods = {path: ", ".join(sorted(of)) for path, of in roles.ALLOWED.items()}
    methods |= dict.fromkeys(roles.OPEN, "anybody")
    everybody = ", ".join(sorted(Role))
    lines = ["| Method | Roles |", "| --- | --- |"]
    for path, who in sorted(methods.items()):
        lines.append(f"| `{path.removeprefix('/')}` | {'all' if who == everybody else who} |")
    return "\n".join(lines) + "\n"


MADE: dict[str, Callable[[], str]] = {
    "roles": roles_table,
    "step-states": lambda: states_table(step.TRANSITIONS, step.StepState, step.StepEvent),
    "step-diagram": lambda: states_diagram(step.TRANSITIONS, step.StepState),
    "run-states": lambda: states_table(run.TRANSITIONS, run.RunState, run.RunEvent),
    "run-diagram": lambda: states_diagram(run.TRANSITIONS, run.RunState),
    "scheduler-settings": lambda: settings_table(SchedulerSettings),
    "scheduler-metrics": metrics_table,
    "executor-settings": lambda: settings_table(ExecutorSettings),
}


def main() -> None:
    """Write every region of every document in docs/reference."""
    for path in sorted(REFERENCE.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
