"""What differs between two runs, step by step, and what it comes from."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final

from rara.v1 import common_pb2, workflow_pb2
from rara_client.cursors import RUN_ENDED, STEP_ENDED

from rara_cli import words
from rara_cli.jsondiff import ABSENT, Unread, at, differences, is_equal, parse, split
from rara_cli.jsonview import to_json
from rara_cli.runview import dependencies, references

MAX_DIFFERENCES: Final = 20  # that are told of one thing; the rest is counted

# A cancelled step's own word for why it was not run to its end; none of them is about the step itself.
_ENDED_FROM_OUTSIDE: Final = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "NO_CAPABLE_EXECUTOR"})


class Verdict(StrEnum):
    """How a step compares, the most telling first."""

    CAUSE = "cause"  # its result differs, and something of its own does
    UNEXPLAINED = "unexplained"  # its result differs, and nothing that is known does
    ONLY_A = "only_in_a"
    ONLY_B = "only_in_b"
    CONSEQUENCE = "consequence"  # its result differs, because of what the steps before it gave
    OPEN = "not_ended"
    SAME_RESULT = "same_result"  # although something that it was given or made by differs
    SAME = "same"


class CauseKind(StrEnum):
    DEFINITION = "definition"
    INPUT = "input"
    INPUT_ARTIFACT = "input_artifact"
    READ = "read"  # an artifact that the definition does not name
    CODE = "code"
    ENDED = "ended"  # somebody or a deadline ended it
    UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that differs before a step begins.

    what: a path, a name; of code what about it. through: of an upstream step, what is taken from it.
    """

    kind: CauseKind
    what: str
    a: object = ABSENT
    b: object = ABSENT
    through: tuple[str, ...] = ()


class ChangeKind(StrEnum):
    STATE = "state"
    OUTPUT = "output"
    ARTIFACT = "artifact"


@dataclass(frozen=True, slots=True)
class Change:
    """Something that differs in what a step came to."""

    kind: ChangeKind
    what: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class Blob:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class LoadedRun:
    """A run with all that is compared of it. steps: by name. reads: digests that a step (by id) read undeclared."""

    run: workflow_pb2.WorkflowRun
    definition: workflow_pb2.Definition
    steps: Mapping[str, workflow_pb2.StepRun]
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.run.state in RUN_ENDED

    @cached_property
    def input(self) -> object:
        return value_of(self.run.input) if self.run.HasField("input") else ABSENT

    @cached_property
    def specs(self) -> dict[str, workflow_pb2.StepDefinition]:
        return {step.step_name: step for step in self.definition.steps}

    @cached_property
    def input_artifacts(self) -> dict[str, Blob]:
        return _blobs(self.run.input_artifacts)

    @cached_property
    def outputs(self) -> dict[str, object]:
        return {
            name: value_of(step.output) if step.HasField("output") else ABSENT
            for name, step in self.steps.items()
        }

    @cached_property
    def artifacts(self) -> dict[str, dict[str, Blob]]:
        return {name: _blobs(step.manifest.artifacts) for name, step in self.steps.items()}

    @cached_property
    def made_by(self) -> dict[str, tuple[str, str]]:
        """The step and the artifact's name, by digest; the first of equal ones."""
        made: dict[str, tuple[str, str]] = {}
        for step, artifacts in self.artifacts.items():
            for name, blob in artifacts.items():
                made.setdefault(blob.sha256, (step, name))
        return made

    @cached_property
    def failed_step(self) -> str:
        """The first step that made the run fail; empty: none."""
        wanted = self.run.failed_step_run_id
        return next((name for name, step in self.steps.items() if step.step_run_id == wanted), "")


def value_of(payload: common_pb2.Payload) -> object:
    if payload.omitted_bytes:
        return Unread(payload.omitted_bytes)
    return parse(payload.data)


def _blobs(artifacts: Sequence[common_pb2.Artifact]) -> dict[str, Blob]:
    return {item.name: Blob(item.digest.sha256, item.digest.size_bytes) for item in artifacts}


@dataclass(frozen=True, slots=True)
class StepComparison:
    """a, b: the step in each run; None: it has none. more: differences of the result that are only counted.

    unread: of an output of this size, too large to be fetched, it is not known whether it differs.
    """

    step_name: str
    verdict: Verdict
    causes: tuple[Cause, ...]
    changes: tuple[Change, ...]
    a: workflow_pb2.StepRun | None
    b: workflow_pb2.StepRun | None
    more: int = 0
    unread_bytes: int = 0


class Result(StrEnum):
    SAME = "same"
    SAME_RESULT = "same_result"  # of every step, although something else differs
    SAME_SO_FAR = "same_so_far"  # and not all has ended
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """given: what differs between the runs as they were started. steps: the most telling first."""

    a: LoadedRun
    b: LoadedRun
    given: tuple[Cause, ...]
    steps: tuple[StepComparison, ...]

    @property
    def is_one_run(self) -> bool:
        return self.a.run.workflow_run_id == self.b.run.workflow_run_id

    def of(self, *verdicts: Verdict) -> list[StepComparison]:
        return [step for step in self.steps if step.verdict in verdicts]

    @property
    def differing(self) -> list[StepComparison]:
        return [step for step in self.steps if step.verdict in _DIFFERING]

    @property
    def result(self) -> Result:
        if self.differing:
            return Result.DIFFERENT
        if not (self.a.has_ended and self.b.has_ended) and not self.is_one_run:
            return Result.SAME_SO_FAR
        return Result.SAME_RESULT if self.given or self.of(Verdict.SAME_RESULT) else Result.SAME


_RANK: Final = {verdict: place for place, verdict in enumerate(Verdict)}
_DIFFERING: Final = frozenset(
    {Verdict.CAUSE, Verdict.UNEXPLAINED, Verdict.ONLY_A, Verdict.ONLY_B, Verdict.CONSEQUENCE}
)


def compare(a: LoadedRun, b: LoadedRun) -> Comparison:
    """Steps are matched by name, so that runs of different definitions compare, too."""
    names = _in_order(a, b)
    places = {name: place for place, name in enumerate(names)}
    results = {name: _changes(name, a, b) for name in names if name in a.steps and name in b.steps}
    causes = {name: tuple(_causes(name, a, b, results)) for name in results}
    followers = _followers(names, causes)
    steps = [_step(name, a, b, results, causes, followers) for name in names]
    steps.sort(key=lambda step: (_RANK[step.verdict], places[step.step_name]))
    return Comparison(a, b, tuple(_given(a, b)), tuple(steps))


def _in_order(a: LoadedRun, b: LoadedRun) -> list[str]:
    """All steps: each behind those that it depends on, as far as the two definitions agree."""
    names = dict.fromkeys([*a.specs, *b.specs, *a.steps, *b.steps])
    before = {
        name: {each for run in (a, b) if name in run.specs for each in dependencies(run.specs[name])}
        & names.keys()
        for name in names
    }
    after: dict[str, list[str]] = {name: [] for name in names}
    for name, others in before.items():
        for other in others:
            after[other].append(name)
    left = {name: len(others) for name, others in before.items()}
    ready = [name for name in names if not left[name]]
    for name in ready:  # grows on the way
        for other in after[name]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    rest = set(names) - set(ready)  # in a circle that only the two together make
    return [*ready, *(name for name in names if name in rest)]


def _step(
    name: str,
    a: LoadedRun,
    b: LoadedRun,
    results: Mapping[str, "_Result"],
    causes: Mapping[str, tuple[Cause, ...]],
    followers: frozenset[str],
) -> StepComparison:
    left, right = a.steps.get(name), b.steps.get(name)
    if left is None or right is None:
        verdict = Verdict.ONLY_B if left is None else Verdict.ONLY_A
        return StepComparison(name, verdict, (), (), left, right)
    result, because = results[name], causes[name]
    if left.step_run_id == right.step_run_id:
        verdict = Verdict.SAME
    elif result.is_open:
        verdict = Verdict.OPEN
    elif not result.changes:
        verdict = Verdict.SAME_RESULT if because else Verdict.SAME
    elif not because:
        verdict = Verdict.UNEXPLAINED
    else:
        verdict = Verdict.CONSEQUENCE if name in followers else Verdict.CAUSE
    return StepComparison(
        name, verdict, because, result.changes, left, right, result.more, result.unread_bytes
    )


# ---------------------------------------------------------------- what a step came to


@dataclass(frozen=True, slots=True)
class _Result:
    changes: tuple[Change, ...]
    is_open: bool = False
    more: int = 0
    unread_bytes: int = 0


def _changes(name: str, a: LoadedRun, b: LoadedRun) -> _Result:
    left, right = a.steps[name], b.steps[name]
    if left.step_run_id == right.step_run_id:
        return _Result(())
    is_open = left.state not in STEP_ENDED or right.state not in STEP_ENDED
    changes = []
    if (left.state, left.reason) != (right.state, right.reason):
        changes.append(Change(ChangeKind.STATE, "", _outcome(left), _outcome(right)))
    if is_open:
        return _Result(tuple(changes), is_open=True)
    unread = 0
    if _succeeded(left) and _succeeded(right):
        if left.output != right.output or left.output.omitted_bytes:
            out_a, out_b = a.outputs[name], b.outputs[name]
            unread = _unread_bytes(out_a, out_b)
            found = () if unread else differences(out_a, out_b)
            changes += [Change(ChangeKind.OUTPUT, each.path, each.a, each.b) for each in found]
        changes += _artifact_changes(a.artifacts[name], b.artifacts[name])
    more = max(len(changes) - MAX_DIFFERENCES, 0)
    return _Result(tuple(changes[:MAX_DIFFERENCES]), False, more, unread)


def _outcome(step: workflow_pb2.StepRun) -> str:
    state = words.step_state(step.state)
    return f"{state} {step.reason}" if step.reason else state


def _succeeded(step: workflow_pb2.StepRun) -> bool:
    return step.state == workflow_pb2.STEP_RUN_STATE_SUCCEEDED


def _unread_bytes(a: object, b: object) -> int:
    """Of two values of one size that were both left out nothing can be said; 0: something can."""
    return a.size_bytes if isinstance(a, Unread) and a == b and a.why == "large" else 0


def _artifact_changes(a: Mapping[str, Blob], b: Mapping[str, Blob]) -> list[Change]:
    names = dict.fromkeys([*a, *b])
    pairs = ((name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in names)
    return [Change(ChangeKind.ARTIFACT, name, left, right) for name, left, right in pairs if left != right]


# ---------------------------------------------------------------- what it comes from


def _given(a: LoadedRun, b: LoadedRun) -> Iterator[Cause]:
    """What the runs were started with: input, artifacts, and of the definition what concerns no single step."""
    found = itertools.islice(differences(a.input, b.input), MAX_DIFFERENCES)
    yield from (Cause(CauseKind.INPUT, each.path, each.a, each.b) for each in found)
    for change in _artifact_changes(a.input_artifacts, b.input_artifacts)[:MAX_DIFFERENCES]:
        yield Cause(CauseKind.INPUT_ARTIFACT, change.what, change.a, change.b)
    if not _share_definition(a, b):
        one, other = (f"{run.definition.definition} v{run.definition.version}" for run in (a, b))
        yield Cause(CauseKind.DEFINITION, "", one, other)
        fields = ("run_timeout", "on_failure", "labels")
        left, right = (
            {name: value for name, value in to_json(run.definition).items() if name in fields}
            for run in (a, b)
        )
        for each in itertools.islice(differences(left, right), MAX_DIFFERENCES):
            yield Cause(CauseKind.DEFINITION, each.path, each.a, each.b)


def _share_definition(a: LoadedRun, b: LoadedRun) -> bool:
    one, other = a.definition, b.definition
    return (one.definition, one.version) == (other.definition, other.version)


def _causes(name: str, a: LoadedRun, b: LoadedRun, results: Mapping[str, _Result]) -> list[Cause]:
    left, right = a.steps[name], b.steps[name]
    if left.step_run_id == right.step_run_id:
        return []
    spec_a, spec_b = a.specs.get(name), b.specs.get(name)
    through: dict[str, list[str]] = {}
    own: list[Cause] = []
    if spec_a is not None and spec_b is not None:
        own += _definition_causes(a, b, spec_a, spec_b)
        own += _input_causes(a, b, spec_a, spec_b, through)
        own += _artifact_causes(a, b, spec_a, spec_b, through)
    own += _read_causes(a, b, left, right, through)
    own += _code_causes(left, right)
    own += _ending_causes(a, b, left, right, through, results)
    if not own and not through and results[name].changes and spec_a is not None and spec_b is not None:
        # Nothing is handed over, and still one runs after the other for a reason.
        before = dependencies(spec_a)
        for other in dependencies(spec_b):
            if other in before and other in results and results[other].changes:
                through.setdefault(other, []).append("its end")
    return own + [
        Cause(CauseKind.UPSTREAM, other, through=tuple(dict.fromkeys(parts)))
        for other, parts in through.items()
    ]


def _definition_causes(
    a: LoadedRun, b: LoadedRun, one: workflow_pb2.StepDefinition, other: workflow_pb2.StepDefinition
) -> Iterator[Cause]:
    if _share_definition(a, b) or one == other:
        return
    for each in itertools.islice(differences(to_json(one), to_json(other)), MAX_DIFFERENCES):
        yield Cause(CauseKind.DEFINITION, each.path, each.a, each.b)


def _input_causes(
    a: LoadedRun,
    b: LoadedRun,
    one: workflow_pb2.StepDefinition,
    other: workflow_pb2.StepDefinition,
    through: dict[str, list[str]],
) -> Iterator[Cause]:
    """By what both templates refer to; what only one refers to is a difference of the definitions."""
    wanted = set(references(other))
    told: set[str] = set()
    for pointer in references(one):
        if pointer not in wanted:
            continue
        match split(pointer):
            case ["run", "input", *rest]:
                base = pointer.removeprefix("/run/input")
                for each in itertools.islice(
                    differences(at(a.input, rest), at(b.input, rest)), MAX_DIFFERENCES
                ):
                    if base + each.path not in told:
                        told.add(base + each.path)
                        yield Cause(CauseKind.INPUT, base + each.path, each.a, each.b)
            case ["steps", step, "output", *rest]:
                left, right = (at(run.outputs.get(step, ABSENT), rest) for run in (a, b))
                if not is_equal(left, right):
                    what = pointer.split("/output", 1)[1]
                    through.setdefault(step, []).append(f"output {what}".rstrip())


def _artifact_causes(
    a: LoadedRun,
    b: LoadedRun,
    one: workflow_pb2.StepDefinition,
    other: workflow_pb2.StepDefinition,
    through: dict[str, list[str]],
) -> Iterator[Cause]:
    bound = {(item.from_step, item.from_name or item.name) for item in other.input_artifacts}
    for item in one.input_artifacts:
        name = item.from_name or item.name
        if (item.from_step, name) not in bound:
            continue
        if item.from_step:
            left, right = (run.artifacts.get(item.from_step, {}).get(name) for run in (a, b))
            if left != right:
                through.setdefault(item.from_step, []).append(f"artifact {name}")
            continue
        given_a, given_b = (run.input_artifacts.get(name, ABSENT) for run in (a, b))
        if given_a != given_b:
            yield Cause(CauseKind.INPUT_ARTIFACT, name, given_a, given_b)


def _read_causes(
    a: LoadedRun,
    b: LoadedRun,
    left: workflow_pb2.StepRun,
    right: workflow_pb2.StepRun,
    through: dict[str, list[str]],
) -> Iterator[Cause]:
    """Artifacts that were read without being named in the definition; those that the run itself made are a step's."""
    read_a = a.reads.get(left.step_run_id, frozenset())
    read_b = b.reads.get(right.step_run_id, frozenset())
    only_a, only_b = sorted(read_a - read_b), sorted(read_b - read_a)
    sources = {run.made_by[sha256] for run, only in ((a, only_a), (b, only_b)) for sha256 in only
               if sha256 in run.made_by}  # fmt: skip
    for step, name in sorted(sources):
        through.setdefault(step, []).append(f"artifact {name}")
    foreign = [(sha256, True) for sha256 in only_a if sha256 not in a.made_by]
    foreign += [(sha256, False) for sha256 in only_b if sha256 not in b.made_by]
    for sha256, is_a in foreign[:MAX_DIFFERENCES]:
        yield Cause(CauseKind.READ, sha256, "read" if is_a else ABSENT, ABSENT if is_a else "read")


def _code_causes(left: workflow_pb2.StepRun, right: workflow_pb2.StepRun) -> Iterator[Cause]:
    """Only what is known on both sides is compared."""
    one, other = left.handler, right.handler
    known = (
        ("version", one.kind_version, other.kind_version),
        ("language", one.executor_kind, other.executor_kind),
        ("sdk", one.sdk, other.sdk),
    )
    for what, was, now in known:
        if was and now and was != now:
            yield Cause(CauseKind.CODE, what, was, now)
            if what == "language":
                return  # another language has another SDK, which tells nothing more


def _ending_causes(
    a: LoadedRun,
    b: LoadedRun,
    left: workflow_pb2.StepRun,
    right: workflow_pb2.StepRun,
    through: dict[str, list[str]],
    results: Mapping[str, _Result],
) -> Iterator[Cause]:
    """Why a step was not run to its end, where that is not about the step."""
    if (left.state, left.reason) == (right.state, right.reason):
        return
    for run, step in ((a, left), (b, right)):
        if step.state != workflow_pb2.STEP_RUN_STATE_CANCELLED:
            continue
        if step.reason in _ENDED_FROM_OUTSIDE:
            yield Cause(CauseKind.ENDED, step.reason, _outcome(left), _outcome(right))
        elif step.reason == "SIBLING_FAILED" and run.failed_step not in ("", step.step_name):
            through.setdefault(run.failed_step, []).append("its failure")
        elif step.reason == "UPSTREAM_FAILED" and step.step_name in run.specs:
            for other in dependencies(run.specs[step.step_name]):
                if other in results and results[other].changes:
                    through.setdefault(other, []).append("its failure")


_Key = tuple[str, ...]


def _followers(names: Sequence[str], causes: Mapping[str, tuple[Cause, ...]]) -> frozenset[str]:
    """Steps that differ through others, and by nothing of their own that had not made one of those differ before."""
    seen: dict[str, frozenset[_Key]] = {}
    followers = set()
    for name in names:  # each behind those that it depends on
        own = frozenset(
            _key(name, cause) for cause in causes.get(name, ()) if cause.kind != CauseKind.UPSTREAM
        )
        before: frozenset[_Key] = frozenset()
        others = [cause.what for cause in causes.get(name, ()) if cause.kind == CauseKind.UPSTREAM]
        for other in others:
            before |= seen.get(other, frozenset())
        if others and own <= before:
            followers.add(name)
        seen[name] = before | own if own - before else before
    return frozenset(followers)


def _key(name: str, cause: Cause) -> _Key:
    match cause.kind:
        case CauseKind.INPUT | CauseKind.INPUT_ARTIFACT:
            return cause.kind, cause.what
        case CauseKind.CODE if cause.what != "version":
            return cause.kind, cause.what, str(cause.a), str(cause.b)
        case CauseKind.READ:
            return cause.kind, cause.what
        case _:
            return cause.kind, cause.what, name
