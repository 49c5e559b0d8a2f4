"""A comparison of two runs on the screen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.answers import print_document, width
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
)
from rara_cli.exits import Exit
from rara_cli.jsondiff import ABSENT, Unread, delta, delta_text, plain, short_pair
from rara_cli.jsonview import Json, dumps
from rara_cli.session import Session
from rara_cli.steps import handler_text
from rara_cli.tables import Column, render

_LINES: Final = 6  # of one step
_NAMES: Final = 5  # in one sentence
_GROUPS: Final = 3

_VERDICTS: Final = {Verdict.ONLY_A: "only in A", Verdict.ONLY_B: "only in B"}


def show_comparison(session: Session, comparison: Comparison, *, limit: int) -> None:
    """limit: how many steps the table shows."""
    match session.output:
        case "json":
            print_document(document(comparison))
        case "jsonl":
            print(dumps(document(comparison)))
        case "name":
            for step in comparison.differing:
                print(step.step_name)
        case _:
            for line in text_lines(
                comparison,
                limit=limit,
                is_wide=session.output == "wide",
                columns=width(session),
                in_color=session.in_color,
            ):
                print(line)


def exit_of(comparison: Comparison) -> Exit:
    match comparison.result:
        case Result.DIFFERENT:
            return Exit.DIFFERENT
        case Result.SAME_SO_FAR:
            return Exit.STILL_GOING
        case _:
            return Exit.OK


# ---------------------------------------------------------------- for people


@dataclass(frozen=True, slots=True)
class _Line:
    step: StepComparison
    cause: str
    change: str
    is_first: bool


def text_lines(
    comparison: Comparison,
    *,
    limit: int = 50,
    is_wide: bool = False,
    columns: int | None = None,
    in_color: bool = False,
) -> list[str]:
    """The two runs, a table with the causes first, what is the same, and last a sentence that says it all."""
    if comparison.is_one_run:
        return [*_run_lines(comparison), "", sentence(comparison)]
    lines = _run_lines(comparison)
    shown = [step for step in comparison.steps if step.verdict not in (Verdict.SAME, Verdict.SAME_RESULT)]
    if shown:
        rows = [line for step in shown[:limit] for line in _step_lines(step)]
        chosen = [column for column in _COLUMNS if is_wide or not column.wide_only]
        lines += ["", *render(rows, chosen, width=columns, in_color=in_color)]
    if len(shown) > limit:
        lines.append(f"… and {len(shown) - limit:,} more steps: --limit {len(shown)}, or -o json")
    return [*lines, "", *_same_lines(comparison), sentence(comparison)]


def _run_lines(comparison: Comparison) -> list[str]:
    cells = [(letter, *_run_cells(run)) for letter, run in (("A", comparison.a), ("B", comparison.b))]
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def _run_cells(run: LoadedRun) -> tuple[str, ...]:
    one = run.run
    return (
        one.workflow_run_id,
        f"{words.clean(one.definition)} v{one.definition_version}",
        words.run_state(one.state),
        _took(one),
    )


def _took(one: workflow_pb2.WorkflowRun | workflow_pb2.StepRun | None) -> str:
    seconds = _seconds(one)
    return "" if seconds is None else words.took_text(seconds)


def _seconds(one: workflow_pb2.WorkflowRun | workflow_pb2.StepRun | None) -> float | None:
    """From the start of the run, or of the step's last attempt, to the end; None: there is no such time yet."""
    if one is None or not one.started_at.seconds or not one.ended_at.seconds:
        return None
    return (words.instant(one.ended_at) - words.instant(one.started_at)).total_seconds()


def _step_lines(step: StepComparison) -> list[_Line]:
    told = step.causes
    if step.verdict is Verdict.CONSEQUENCE:  # what it follows from first; the rest was told of a step before
        told = tuple(sorted(told, key=lambda cause: cause.kind is not CauseKind.UPSTREAM))
    causes = _bounded([cause_text(cause) for cause in told])
    if step.verdict is Verdict.UNEXPLAINED:
        causes = ["nothing that is known"]
    changes = _bounded([change_text(change) for change in step.changes], step.more)
    pairs = itertools.zip_longest(causes or [""], changes, fillvalue="")
    return [_Line(step, cause, change, is_first=not n) for n, (cause, change) in enumerate(pairs)]


def _bounded(texts: list[str], more: int = 0) -> list[str]:
    more += max(len(texts) - _LINES, 0)
    return [*texts[:_LINES], *([f"… and {more} more"] if more else [])]


def verdict_text(verdict: Verdict) -> str:
    return _VERDICTS.get(verdict, verdict.replace("_", " "))


def cause_text(cause: Cause) -> str:
    """`input /depth 10 → 20`, `index: artifact index`."""
    match cause.kind:
        case CauseKind.UPSTREAM:
            return f"{cause.what}: {', '.join(cause.through)}"
        case CauseKind.READ:
            return f"artifact {cause.what[:12]} read in {'B' if cause.a is ABSENT else 'A'} only"
        case CauseKind.ENDED:
            return cause.what
        case CauseKind.CODE:
            return f"{'code' if cause.what == 'version' else cause.what} {cause.a} → {cause.b}"
        case _:
            what = f"{cause.kind.replace('_', ' ')} {cause.what}".rstrip()
            return f"{what} {_values(cause.a, cause.b)}"


def change_text(change: Change) -> str:
    """`output /mrr 0.81 → 0.83 (+0.02)`."""
    if change.kind is ChangeKind.STATE:
        return f"{change.a} → {change.b}"
    what = f"{change.kind} {change.what}".rstrip()
    more = delta(change.a, change.b)
    return f"{what} {_values(change.a, change.b)}" + (f" ({delta_text(more)})" if more is not None else "")


def _values(a: object, b: object) -> str:
    left, right = short_pair(*(one.sha256 if isinstance(one, Blob) else one for one in (a, b)))
    return f"{left} → {right}"


def _both(left: str, right: str) -> str:
    return left if left == right else f"{left or 'none'} → {right or 'none'}"


def _attempts(step: workflow_pb2.StepRun | None) -> str:
    return str(step.attempt) if step is not None and step.attempt else ""


def _ran(step: workflow_pb2.StepRun | None) -> str:
    return handler_text(step.handler) if step is not None else ""


_COLUMNS: Final[list[Column[_Line]]] = [
    Column("STEP", lambda line: line.step.step_name if line.is_first else ""),
    Column("IS", lambda line: verdict_text(line.step.verdict) if line.is_first else ""),
    Column("BECAUSE OF", lambda line: line.cause),
    Column("WHAT DIFFERS", lambda line: line.change),
    Column("TOOK", lambda line: _both(_took(line.step.a), _took(line.step.b)) if line.is_first else ""),
    Column(
        "ATTEMPTS",
        lambda line: _both(_attempts(line.step.a), _attempts(line.step.b)) if line.is_first else "",
        wide_only=True,
    ),
    Column(
        "RAN",
        lambda line: _both(_ran(line.step.a), _ran(line.step.b)) if line.is_first else "",
        wide_only=True,
    ),
]


def _same_lines(comparison: Comparison) -> list[str]:
    lines = []
    if although := comparison.of(Verdict.SAME_RESULT):
        texts = [f"{step.step_name} ({', '.join(map(cause_text, step.causes[:2]))})" for step in although]
        lines.append(f"same result, although something differs: {_names(texts)}")
    if same := comparison.of(Verdict.SAME):
        lines.append(f"same in all: {_names([step.step_name for step in same])}")
    if unread := [step.step_name for step in comparison.steps if step.unread_bytes]:
        lines.append(f"not compared, since their outputs are large: {_names(unread)}")
    return [words.clean(line) for line in lines]


def sentence(comparison: Comparison) -> str:
    """What differs, in words."""
    total = len(comparison.steps)
    match comparison.result:
        case Result.DIFFERENT:
            return words.clean(
                f"{len(comparison.differing):,} of {total:,} steps differ: {_why(comparison)}."
            )
        case _ if comparison.is_one_run:
            return "same: A and B are one run"
        case Result.SAME_SO_FAR:
            waiting = len(comparison.of(Verdict.OPEN))
            return f"same so far: {waiting:,} of {total:,} steps have not ended in both"
        case Result.SAME_RESULT:
            given = _names(_differences_given(comparison))
            return words.clean(f"same results in all {total:,} steps, although this differs: {given}")
        case Result.SAME:
            return f"same: {total:,} steps with equal input, definition, code and results"


def _differences_given(comparison: Comparison) -> list[str]:
    own = [cause for step in comparison.of(Verdict.SAME_RESULT) for cause in step.causes]
    return list(dict.fromkeys(map(cause_text, [*comparison.given, *own])))


def _why(comparison: Comparison) -> str:
    groups: dict[str, list[str]] = {}
    for step in comparison.of(Verdict.CAUSE):
        own = [cause_text(cause) for cause in step.causes if cause.kind is not CauseKind.UPSTREAM]
        groups.setdefault(_names(own, most=2), []).append(step.step_name)
    parts = [f"{_names(names)} because of {cause}" for cause, names in list(groups.items())[:_GROUPS]]
    if len(groups) > _GROUPS:
        parts.append(f"{sum(map(len, list(groups.values())[_GROUPS:])):,} more for reasons of their own")
    if names := [step.step_name for step in comparison.of(Verdict.UNEXPLAINED)]:
        parts.append(f"{_names(names)} in spite of equal input, definition and code")
    parts.extend(
        f"{_names(names)} {'is' if len(names) == 1 else 'are'} {verdict_text(verdict)}"
        for verdict in (Verdict.ONLY_A, Verdict.ONLY_B)
        if (names := [step.step_name for step in comparison.of(verdict)])
    )
    if names := [step.step_name for step in comparison.of(Verdict.CONSEQUENCE)]:
        parts.append(f"{_names(names)} {'follows' if len(names) == 1 else 'follow'} from that")
    return "; ".join(parts)


def _names(names: Sequence[str], most: int = _NAMES) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


# ---------------------------------------------------------------- for scripts


def document(comparison: Comparison) -> Json:
    return {
        "result": comparison.result,
        "sentence": sentence(comparison),
        "a": _run_document(comparison.a),
        "b": _run_document(comparison.b),
        "given": [_cause_document(cause) for cause in comparison.given],
        "steps": [_step_document(comparison, step) for step in comparison.steps],
    }


def _run_document(run: LoadedRun) -> Json:
    one = run.run
    return {
        "workflow_run_id": one.workflow_run_id,
        "definition": one.definition,
        "definition_version": one.definition_version,
        "state": words.run_state(one.state),
        "seconds": _seconds(one),
    }


def _step_document(comparison: Comparison, step: StepComparison) -> Json:
    made: Json = {
        "step_name": step.step_name,
        "verdict": step.verdict,
        "causes": [_cause_document(cause) for cause in step.causes],
        "changes": [_change_document(change) for change in step.changes],
        "more_changes": step.more,
        "unread_output_bytes": step.unread_bytes,
    }
    for letter, run, one in (("a", comparison.a, step.a), ("b", comparison.b, step.b)):
        if one is not None:
            made[letter] = {
                "step_run_id": one.step_run_id,
                "state": words.step_state(one.state),
                "reason": one.reason,
                "attempt": one.attempt,
                "seconds": _seconds(one),
                "is_reused": one.workflow_run_id != run.run.workflow_run_id,
                "ran_version": one.handler.kind_version,
                "ran_in": one.handler.executor_kind,
                "sdk": one.handler.sdk,
            }
    return made


def _cause_document(cause: Cause) -> Json:
    made: Json = {"kind": cause.kind, "what": cause.what}
    if cause.kind is CauseKind.UPSTREAM:
        made["through"] = list(cause.through)
    return made | _sides(cause.a, cause.b)


def _change_document(change: Change) -> Json:
    made: Json = {"kind": change.kind, "what": change.what} | _sides(change.a, change.b)
    more = delta(change.a, change.b)
    return made if more is None else made | {"delta": plain(more)}


def _sides(a: object, b: object) -> Json:
    """What a side does not have has no key."""
    return {letter: _plain(value) for letter, value in (("a", a), ("b", b)) if value is not ABSENT}


def _plain(value: object) -> object:
    match value:
        case Blob():
            return {"sha256": value.sha256, "size_bytes": value.size_bytes}
        case Unread():
            return {"omitted_bytes": value.size_bytes}
        case _:
            return plain(value)
