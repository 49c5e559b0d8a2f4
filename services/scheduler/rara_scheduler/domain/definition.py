"""Workflow definitions: what the wire says, checked as a whole, as values that everything else works with."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from google.protobuf.duration_pb2 import Duration
from rara.v1 import workflow_pb2

from rara_scheduler.domain import names
from rara_scheduler.domain.canonical import Json, loads_exact
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.graph import downstream, find_cycle
from rara_scheduler.domain.payload import check_payload, pointer
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.secrets import find_secret, value_rule
from rara_scheduler.domain.template import Reference, TemplateError, references
from rara_scheduler.domain.violations import Violations

_DAY_S: Final = 86_400
MAX_TIMEOUT_S: Final = 366.0 * _DAY_S
MAX_GRACE_S: Final = 1.0 * _DAY_S
MAX_BACKOFF_S: Final = 31.0 * _DAY_S
MIN_TIMEOUT_S: Final = 0.001
MAX_ATTEMPTS: Final = 1000
MAX_MULTIPLIER: Final = 100.0


@dataclass(frozen=True, slots=True)
class DefinitionLimits:
    """How large a definition may be; sizes in bytes. Exactly the limit passes."""

    max_steps: int = 10_000
    max_payload_bytes: int = 1024 * 1024
    max_dependencies: int = 1000  # of one step
    max_edges: int = 200_000  # of all steps
    max_artifacts: int = 256  # bindings of one step
    max_secrets: int = 64  # of one step
    max_terminal_codes: int = 64


@dataclass(frozen=True, slots=True)
class SecretName:
    """Where an executor finds a secret; never the secret. Empty version: the current one."""

    provider: str
    name: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """Hands an artifact to a step under `name`; from_step is empty for the run's input artifacts."""

    name: str
    from_step: str
    from_name: str  # never empty: the default, `name`, is filled in


@dataclass(frozen=True)
class StepSpec:
    """One step. Times in seconds, None where there is none."""

    step_name: str
    executor_kind: str
    kind: str
    kind_version: str
    depends_on: tuple[str, ...]  # declared, and those that template and artifacts name; each once
    template: Json = field(hash=False)  # None: the step gets the input of the run
    template_data: bytes  # as it was sent; empty: none
    template_references: tuple[Reference, ...]  # empty: the template is the input as it stands
    input_artifacts: tuple[Binding, ...]
    secrets: Mapping[str, SecretName] = field(hash=False)
    required_labels: Mapping[str, str] = field(hash=False)
    retry: RetryPolicy
    timeout_s: float | None = None
    attempt_timeout_s: float | None = None
    progress_timeout_s: float | None = None
    schedule_timeout_s: float | None = None
    cancel_grace_s: float | None = None


@dataclass(frozen=True)
class DefinitionSpec:
    """One immutable version. `steps` are in the order of the definition."""

    definition: str
    version: int
    content_sha256: str
    steps: Mapping[str, StepSpec] = field(hash=False)
    run_timeout_s: float | None
    on_failure: Literal["fail_fast", "continue"]
    labels: Mapping[str, str] = field(hash=False)
    _dependants: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[str, list[str]] = {}
        for name, step in self.steps.items():
            for up in step.depends_on:
                found.setdefault(up, []).append(name)
        object.__setattr__(self, "_dependants", {name: tuple(downs) for name, downs in found.items()})

    @property
    def allows_secrets(self) -> bool:
        return allows_secrets(self.labels)

    def dependants(self, step_name: str) -> tuple[str, ...]:
        """The steps that depend on it directly."""
        return self._dependants.get(step_name, ())

    def downstream(self, step_names: Iterable[str]) -> set[str]:
        """The steps named and all that depend on them, directly or not."""
        return downstream(self._dependants, step_names)


def allows_secrets(labels: Mapping[str, str]) -> bool:
    """Whether the label `rara.allow_secrets=true` opts the definition out of the secret rules, for the record."""
    return labels.get(names.ALLOW_SECRETS) == "true"


def parse_definition(
    message: workflow_pb2.Definition, defaults: RetryPolicy, limits: DefinitionLimits
) -> DefinitionSpec:
    """Check a definition as a whole and return its value; `defaults` fill what a step's policy leaves open.

    What the scheduler gives (version, content_sha256, created_at) is taken over unchecked. A definition with the
    label `rara.allow_secrets=true` may hold raw secrets, and so may the inputs of its runs: the label is stored with
    it and shown wherever the definition is.

    Raises Fault DEFINITION_INVALID listing up to 20 fields by path (`steps[2].depends_on[0]`), or SECRET_IN_PAYLOAD
    where raw secrets are all that is wrong.
    """
    violations = Violations()
    spec = _read(message, defaults, limits, violations)
    if violations:
        raise violations.fault(Code.DEFINITION_INVALID, "the definition cannot be taken")
    return spec


def stored_definition(message: workflow_pb2.Definition, defaults: RetryPolicy) -> DefinitionSpec:
    """The value of a definition that was checked when it was registered, whatever limits have come since."""
    return _read(message, defaults, DefinitionLimits(), Violations(), trusted=True)


def _read(
    message: workflow_pb2.Definition,
    defaults: RetryPolicy,
    limits: DefinitionLimits,
    violations: Violations,
    *,
    trusted: bool = False,
) -> DefinitionSpec:
    labels = dict(message.labels)
    steps: dict[str, StepSpec] = {}
    if not trusted:
        _check_whole(message, limits, violations)
    if trusted or len(message.steps) <= limits.max_steps:
        reader = _StepReader(
            defaults, limits, violations, trusted=trusted, allow_secrets=allows_secrets(labels)
        )
        for index, step in enumerate(message.steps):
            spec = reader.read(step, f"steps[{index}]")
            if spec.step_name in steps:
                violations.add(f"steps[{index}].step_name", f"is given twice: {_shown(spec.step_name)}")
            steps.setdefault(spec.step_name, spec)
        if not trusted:
            _check_graph(message, steps, limits, violations)
    continues = message.on_failure == workflow_pb2.ON_FAILURE_CONTINUE
    return DefinitionSpec(
        definition=message.definition,
        version=message.version,
        content_sha256=message.content_sha256,
        steps=steps,
        run_timeout_s=read_duration(message, "run_timeout", "run_timeout", violations),
        on_failure="continue" if continues else "fail_fast",
        labels=labels,
    )


def _shown(name: str) -> str:
    """A name in a message: only as much of it as is certainly a name."""
    return name if names.STEP.refuses(name) is None else "(not a name)"


def _check_whole(message: workflow_pb2.Definition, limits: DefinitionLimits, violations: Violations) -> None:
    said = names.DEFINITION.refuses(message.definition)
    if said is not None:
        violations.add("definition", said)
    if not message.steps:
        violations.add("steps", "must hold at least one step")
    if len(message.steps) > limits.max_steps:
        violations.add("steps", f"has {len(message.steps)} steps, over the limit of {limits.max_steps}")
    if message.on_failure not in workflow_pb2.OnFailure.values():
        violations.add("on_failure", "is not a value that this scheduler knows")
    check_labels(message.labels, "labels", violations, reserved_allowed=frozenset({names.ALLOW_SECRETS}))
    if names.ALLOW_SECRETS in message.labels and message.labels[names.ALLOW_SECRETS] not in ("true", "false"):
        violations.add(f"labels[{names.ALLOW_SECRETS}]", "must be true or false")
    if not allows_secrets(message.labels):
        check_label_secrets(message.labels, "labels", violations)


def check_labels(
    labels: Mapping[str, str],
    path: str,
    violations: Violations,
    *,
    reserved_allowed: frozenset[str] = frozenset(),
) -> None:
    """Add what is wrong with labels: their number, keys and values."""
    if len(labels) > names.MAX_LABELS:
        violations.add(path, f"has {len(labels)} labels, over the limit of {names.MAX_LABELS}")
        return
    for key, value in labels.items():
        said = names.refuses_label(key, value, reserved_allowed=reserved_allowed)
        if said is not None:
            shown = key if names.LABEL_KEY.refuses(key) is None else "…"
            violations.add(f"{path}[{shown}]", said)


def check_label_secrets(labels: Mapping[str, str], path: str, violations: Violations) -> None:
    """Add the labels that hold raw secrets."""
    found = find_secret(dict(labels))
    if found is not None:
        violations.add(
            pointer(path, found.parts), f"holds a raw secret (rule {found.rule})", Code.SECRET_IN_PAYLOAD
        )


def duration_s(value: Duration) -> float:
    return float(value.seconds + value.nanos / 1e9)


def read_duration(
    message: object,
    name: str,
    path: str,
    violations: Violations,
    *,
    least_s: float = MIN_TIMEOUT_S,
    most_s: float = MAX_TIMEOUT_S,
) -> float | None:
    """Seconds of an optional duration field, or None where it is absent. Adds what is out of bounds."""
    if not message.HasField(name):  # type: ignore[attr-defined]  # any generated message
        return None
    value: Duration = getattr(message, name)
    seconds = duration_s(value)
    if not -1_000_000_000 < value.nanos < 1_000_000_000 or value.seconds * value.nanos < 0:
        violations.add(path, "is not a valid duration")
    elif seconds < 0:
        violations.add(path, "must not be negative")
    elif seconds < least_s:
        violations.add(path, f"must be at least {least_s:g} s; leave it out for none")
    elif seconds > most_s:
        violations.add(path, f"must be at most {most_s:.0f} s")
    return seconds


class _StepReader:
    """Turns one step message after the other into a value, adding what is wrong with it."""

    def __init__(
        self,
        defaults: RetryPolicy,
        limits: DefinitionLimits,
        violations: Violations,
        *,
        trusted: bool,
        allow_secrets: bool,
    ) -> None:
        self._defaults = defaults
        self._limits = limits
        self._violations = violations
        self._trusted = trusted
        self._allow_secrets = allow_secrets

    def read(self, step: workflow_pb2.StepDefinition, path: str) -> StepSpec:
        if not self._trusted:
            self._check_names(step, path)
        template, data, refs = self._template(step, path)
        bindings = tuple(
            Binding(each.name, each.from_step, each.from_name or each.name) for each in step.input_artifacts
        )
        from_template = [ref.step for ref in refs if ref.step is not None]
        from_artifacts = [each.from_step for each in bindings if each.from_step]
        retry = self._retry(step.retry, f"{path}.retry") if step.HasField("retry") else self._defaults
        return StepSpec(
            step_name=step.step_name,
            executor_kind=step.executor_kind,
            kind=step.kind,
            kind_version=step.kind_version,
            depends_on=tuple(dict.fromkeys([*step.depends_on, *from_template, *from_artifacts])),
            template=template,
            template_data=data,
            template_references=refs,
            input_artifacts=bindings,
            secrets={
                name: SecretName(each.provider, each.name, each.version)
                for name, each in step.secrets.items()
            },
            required_labels=dict(step.required_labels),
            retry=retry,
            timeout_s=self._duration(step, "timeout", path),
            attempt_timeout_s=self._duration(step, "attempt_timeout", path),
            progress_timeout_s=self._duration(step, "progress_timeout", path),
            schedule_timeout_s=self._duration(step, "schedule_timeout", path),
            cancel_grace_s=self._duration(step, "cancel_grace", path, least_s=0.0, most_s=MAX_GRACE_S),
        )

    def _duration(
        self,
        message: object,
        name: str,
        path: str,
        *,
        least_s: float = MIN_TIMEOUT_S,
        most_s: float = MAX_TIMEOUT_S,
    ) -> float | None:
        return read_duration(
            message, name, f"{path}.{name}", self._violations, least_s=least_s, most_s=most_s
        )

    def _name(self, rule: names.Rule, text: str, path: str, *, optional: bool = False) -> None:
        if optional and not text:
            return
        said = rule.refuses(text)
        if said is not None:
            self._violations.add(path, said)

    def _count(self, count: int, limit: int, path: str) -> None:
        if count > limit:
            self._violations.add(path, f"has {count} entries, over the limit of {limit}")

    def _check_names(self, step: workflow_pb2.StepDefinition, path: str) -> None:
        self._name(names.STEP, step.step_name, f"{path}.step_name")
        self._name(names.KIND, step.kind, f"{path}.kind")
        self._name(names.KIND_VERSION, step.kind_version, f"{path}.kind_version", optional=True)
        self._name(names.EXECUTOR_KIND, step.executor_kind, f"{path}.executor_kind", optional=True)
        self._count(len(step.depends_on), self._limits.max_dependencies, f"{path}.depends_on")
        self._count(len(step.input_artifacts), self._limits.max_artifacts, f"{path}.input_artifacts")
        self._count(len(step.secrets), self._limits.max_secrets, f"{path}.secrets")
        if step.required_labels:
            check_labels(step.required_labels, f"{path}.required_labels", self._violations)
        seen: set[str] = set()
        for index, binding in enumerate(step.input_artifacts):
            at = f"{path}.input_artifacts[{index}]"
            self._name(names.ARTIFACT, binding.name, f"{at}.name")
            self._name(names.ARTIFACT, binding.from_name, f"{at}.from_name", optional=True)
            if binding.name in seen:
                self._violations.add(f"{at}.name", "is given twice in this step")
            seen.add(binding.name)
        for name, secret in step.secrets.items():
            at = f"{path}.secrets[{name if names.SECRET.refuses(name) is None else '…'}]"
            self._name(names.SECRET, name, at)
            self._name(names.SECRET_PROVIDER, secret.provider, f"{at}.provider")
            self._name(names.SECRET_PATH, secret.name, f"{at}.name")
            self._name(names.SECRET_PATH, secret.version, f"{at}.version", optional=True)
            rule = None if self._allow_secrets else value_rule(secret.name) or value_rule(secret.version)
            if rule is not None:
                self._violations.add(
                    f"{at}.name", f"holds a raw secret (rule {rule})", Code.SECRET_IN_PAYLOAD
                )

    def _template(
        self, step: workflow_pb2.StepDefinition, path: str
    ) -> tuple[Json, bytes, tuple[Reference, ...]]:
        if not step.HasField("input_template"):
            return None, b"", ()
        at = f"{path}.input_template"
        data = step.input_template.data
        try:
            if not self._trusted:
                if step.input_template.omitted_bytes:
                    self._violations.add(at, "was left out of a list: fetch the whole definition")
                    return None, b"", ()
                check_payload(data, step.input_template.media_type, at, self._limits.max_payload_bytes)
            template = loads_exact(data)
            refs = tuple(references(template)) if b"$" in data or b"\\u" in data else ()
        except Fault as fault:
            self._violations.add_fault(fault)
            return None, b"", ()
        except TemplateError as error:
            self._violations.add(at + error.path, error.description)
            return None, b"", ()
        if not self._trusted and not self._allow_secrets:
            found = find_secret(template)
            if found is not None:
                self._violations.add(
                    pointer(at, found.parts),
                    f"holds a raw secret (rule {found.rule})",
                    Code.SECRET_IN_PAYLOAD,
                )
        return template, data, refs

    def _retry(self, policy: workflow_pb2.RetryPolicy, path: str) -> RetryPolicy:
        """A step's policy over the defaults. Where only one backoff is given, the other one gives way to it."""
        add, given = self._violations.add, self._defaults
        if not 0 <= policy.max_attempts <= MAX_ATTEMPTS:
            add(f"{path}.max_attempts", f"must be 1 to {MAX_ATTEMPTS}, or 0 for the default")
        multiplier = policy.backoff_multiplier or given.backoff_multiplier
        if not math.isfinite(multiplier) or not 1.0 <= multiplier <= MAX_MULTIPLIER:
            add(f"{path}.backoff_multiplier", f"must be 1 to {MAX_MULTIPLIER:g}, or 0 for the default")
        first = self._duration(policy, "initial_backoff", path, least_s=0.0, most_s=MAX_BACKOFF_S)
        cap = self._duration(policy, "max_backoff", path, least_s=0.0, most_s=MAX_BACKOFF_S)
        if first is not None and cap is not None and cap < first:
            add(f"{path}.max_backoff", "must not be below initial_backoff")
        self._count(len(policy.terminal_codes), self._limits.max_terminal_codes, f"{path}.terminal_codes")
        for index, code in enumerate(policy.terminal_codes[: self._limits.max_terminal_codes]):
            self._name(names.ERROR_CODE, code, f"{path}.terminal_codes[{index}]")
        if first is None:
            first = given.initial_backoff_s if cap is None else min(given.initial_backoff_s, cap)
        if cap is None:
            cap = max(given.max_backoff_s, first)
        return RetryPolicy(
            max_attempts=policy.max_attempts or given.max_attempts,
            initial_backoff_s=first,
            max_backoff_s=cap,
            backoff_multiplier=multiplier,
            terminal_codes=frozenset(policy.terminal_codes) or given.terminal_codes,
        )


def _check_graph(
    message: workflow_pb2.Definition,
    steps: Mapping[str, StepSpec],
    limits: DefinitionLimits,
    violations: Violations,
) -> None:
    """Dependencies that lead nowhere or to the step itself, too many of them, and cycles."""
    first_index: dict[str, int] = {}
    for index, step in enumerate(message.steps):
        path, own = f"steps[{index}]", step.step_name
        first_index.setdefault(own, index)
        for at, up in enumerate(step.depends_on):
            _check_edge(own, up, steps, f"{path}.depends_on[{at}]", violations)
        for at, binding in enumerate(step.input_artifacts):
            if binding.from_step:
                _check_edge(
                    own, binding.from_step, steps, f"{path}.input_artifacts[{at}].from_step", violations
                )
        for ref in steps[own].template_references if first_index[own] == index else ():
            if ref.step is not None:
                _check_edge(
                    own, ref.step, steps, pointer(f"{path}.input_template", (*ref.at, "$ref")), violations
                )
    edges = sum(len(spec.depends_on) for spec in steps.values())
    if edges > limits.max_edges:
        violations.add("steps", f"has {edges} dependencies, over the limit of {limits.max_edges}")
        return
    depends_on = {
        name: [up for up in spec.depends_on if up != name] for name, spec in steps.items()
    }  # a self-dependency was named already
    cycle = find_cycle(depends_on)
    if cycle:
        violations.add(f"steps[{first_index[cycle[0]]}].depends_on", f"is a cycle: {_trail(cycle)}")


def _check_edge(own: str, up: str, steps: Mapping[str, StepSpec], path: str, violations: Violations) -> None:
    if up == own:
        violations.add(path, "is the step itself")
    elif up not in steps:
        violations.add(path, f"names no step of this definition: {_shown(up)}")


def _trail(cycle: Sequence[str]) -> str:
    """a -> b -> a, each depending on the next; the middle of a long one is left out."""
    shown = [_shown(name) for name in cycle]
    if len(shown) > 12:
        shown = [*shown[:6], f"({len(shown) - 12} more)", *shown[-6:]]
    return " -> ".join(shown)
