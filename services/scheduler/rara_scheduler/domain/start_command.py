"""What starts a run: the values of a request that was checked field by field, and the hash that tells two apart."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

from rara_scheduler.domain.canonical import Json, digest, loads_exact
from rara_scheduler.domain.definition import DefinitionSpec, check_label_secrets
from rara_scheduler.domain.errors import Code, Fault, FieldViolation
from rara_scheduler.domain.payload import pointer
from rara_scheduler.domain.secrets import find_secret, value_rule
from rara_scheduler.domain.violations import Violations

MAX_BATCH: Final = 1000
MAX_BATCH_STEPS: Final = 10_000
MAX_KEY_CHARS: Final = 255
MAX_TRACESTATE_CHARS: Final = 512

_KEY = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class RunArtifact:
    """An artifact handed to a run. inline: its bytes, or None where they are in the blob store."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str = "application/octet-stream"
    type: str = "blob"
    inline: bytes | None = None
    metadata: bytes | None = None


@dataclass(frozen=True, slots=True)
class StartCommand:
    """version 0: the newest. idempotency_key None: each call starts a run. input: JSON that was checked, or None."""

    definition: str
    version: int = 0
    idempotency_key: str | None = None
    input: bytes | None = None
    artifacts: tuple[RunArtifact, ...] = ()
    run_timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    tracestate: str = ""


def of_request(index: int, fault: Fault) -> Fault:
    """What is wrong with one request of a batch, as the batch's own fault: `index` is in its metadata."""
    path = f"requests[{index}]"
    fields = tuple(replace(each, field=f"{path}.{each.field}") for each in fault.fields)
    metadata = fault.metadata | {"index": str(index)}
    if "path" in metadata:
        metadata["path"] = f"{path}.{metadata['path']}"
    return Fault(
        fault.code,
        f"{path}: {fault.message}",
        fields=fields,
        metadata=metadata,
        retry_after_s=fault.retry_after_s,
    )


def check_keys(commands: Sequence[StartCommand]) -> None:
    """Raise FIELD_INVALID where two requests of a batch have one key."""
    seen: dict[str, int] = {}
    violations = Violations()
    for index, command in enumerate(commands):
        key = command.idempotency_key
        if key is None:
            continue
        first = seen.setdefault(key, index)
        if first != index:
            violations.add(f"requests[{index}].idempotency_key", f"is that of requests[{first}] too")
    if violations:
        raise violations.fault(Code.FIELD_INVALID, "the runs cannot be started")


def check_key(key: str, violations: Violations, path: str = "idempotency_key") -> str | None:
    """The caller's key, None where it is empty. Adds what is wrong with it."""
    if key and not _KEY.fullmatch(key):
        violations.add(path, f"must be at most {MAX_KEY_CHARS} characters without control characters")
    elif key and (rule := value_rule(key)):
        violations.add(path, f"holds a raw secret (rule {rule})", Code.SECRET_IN_PAYLOAD)
    return key or None


def clean_trace(traceparent: str, tracestate: str) -> tuple[str, str]:
    """A trace context, or two empty strings: what is malformed is dropped, it must not cost the call."""
    if not _TRACEPARENT.fullmatch(traceparent):
        return "", ""
    usable = tracestate.isascii() and tracestate.isprintable() and len(tracestate) <= MAX_TRACESTATE_CHARS
    return traceparent, tracestate if usable else ""


def request_sha256(command: StartCommand, value: Json) -> str:
    """Equal for requests that ask for the same run: key order, white space and tracing make no difference.

    value: the parsed input. The version counts as it was asked for: 0 stays 0, so that a repeat finds its run after
    a newer version was registered.
    """
    artifacts: list[Json] = [
        [each.name, each.sha256, each.size_bytes, each.media_type, each.type, _parsed(each.metadata)]
        for each in sorted(command.artifacts, key=lambda each: each.name)
    ]
    form: dict[str, Json] = {
        "call": "start",
        "definition": command.definition,
        "version": command.version,
        "input": [] if command.input is None else [value],
        "artifacts": artifacts,
        "run_timeout_s": command.run_timeout_s,
        "labels": dict(command.labels),
    }
    return digest(form)


def retry_sha256(workflow_run_id: str, step_names: Iterable[str]) -> str:
    """As `request_sha256`, for RetryRun; a key used for one call is a conflict in the other."""
    return digest({"call": "retry", "run": workflow_run_id, "steps": list[Json](sorted(set(step_names)))})


def _parsed(data: bytes | None) -> Json:
    return None if data is None else loads_exact(data)


def refuse_secrets(command: StartCommand, value: Json) -> None:
    """Raise SECRET_IN_PAYLOAD if input, labels or artifact metadata hold a raw secret. value: the parsed input."""
    violations = Violations()
    found = None if command.input is None else find_secret(value)
    if found is not None:
        violations.add(
            pointer("input", found.parts), f"holds a raw secret (rule {found.rule})", Code.SECRET_IN_PAYLOAD
        )
    if command.labels:
        check_label_secrets(command.labels, "labels", violations)
    for index, artifact in enumerate(command.artifacts):
        found = None if artifact.metadata is None else find_secret(artifact.metadata)
        if found is not None:
            violations.add(
                pointer(f"input_artifacts[{index}].metadata", found.parts),
                f"holds a raw secret (rule {found.rule})",
                Code.SECRET_IN_PAYLOAD,
            )
    if violations:
        raise violations.fault(Code.SECRET_IN_PAYLOAD, "the run cannot be started")


def check_artifacts(command: StartCommand, spec: DefinitionSpec, max_inline_bytes: int) -> None:
    """Raise unless inline bytes are what their digests say and the definition's steps get the artifacts they name."""
    for index, artifact in enumerate(command.artifacts):
        if artifact.inline is None:
            continue
        path = f"input_artifacts[{index}]"
        if len(artifact.inline) > max_inline_bytes:
            description = f"has {len(artifact.inline)} bytes, over the limit of {max_inline_bytes}; upload it"
            raise Fault(
                Code.PAYLOAD_TOO_LARGE,
                f"{path}.inline: {description}",
                fields=(FieldViolation(f"{path}.inline", description),),
                metadata={"limit_bytes": str(max_inline_bytes)},
            )
        if (
            len(artifact.inline) != artifact.size_bytes
            or sha256(artifact.inline).hexdigest() != artifact.sha256
        ):
            raise Fault(
                Code.ARTIFACT_MISMATCH,
                f"{path}: the inline bytes do not have the digest or size named",
                fields=(FieldViolation(f"{path}.digest", "does not match the inline bytes"),),
                metadata={"name": artifact.name, "sha256": artifact.sha256},
            )
    given = {artifact.name for artifact in command.artifacts}
    violations = Violations()
    for step in spec.steps.values():
        for binding in step.input_artifacts:
            if not binding.from_step and binding.from_name not in given:
                violations.add(
                    "input_artifacts", f"lacks {binding.from_name}, which step {step.step_name} takes"
                )
    if violations:
        raise violations.fault(Code.FIELD_INVALID, "the run cannot be started")
