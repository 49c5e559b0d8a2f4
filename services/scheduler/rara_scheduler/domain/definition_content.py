"""What a definition says, in one canonical form: equal content has equal hashes, whoever wrote it and how."""

from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration
from rara.v1 import workflow_pb2

from rara_scheduler.domain.canonical import Json, digest, loads_exact

_Message: TypeAlias = workflow_pb2.Definition | workflow_pb2.StepDefinition | workflow_pb2.RetryPolicy


def content_of(message: workflow_pb2.Definition) -> workflow_pb2.Definition:
    """A copy without what the scheduler gives: version, hash, time, pause."""
    content = workflow_pb2.Definition()
    content.CopyFrom(message)
    for given in ("version", "content_sha256", "created_at", "pause"):
        content.ClearField(given)
    return content


def content_sha256(message: workflow_pb2.Definition) -> str:
    """The hash of a definition that was checked.

    What makes no difference to a run makes none here: the order of dependencies and labels, white space and key
    order in templates, an unset field written out. The order of the steps counts: it is the order in which ready
    steps are taken.
    """
    return digest(
        _without_empty(
            {
                "definition": message.definition,
                "steps": [_step(step) for step in message.steps],
                "run_timeout": _nanos(message, "run_timeout"),
                "on_failure": "continue" if message.on_failure == workflow_pb2.ON_FAILURE_CONTINUE else None,
                "labels": dict(message.labels),
            }
        )
    )


def _without_empty(form: dict[str, Json]) -> dict[str, Json]:
    return {
        key: value
        for key, value in form.items()
        if value is not None and value != "" and value != {} and value != []
    }


def _nanos(message: _Message, name: str) -> Json:
    if not message.HasField(name):  # type: ignore[arg-type]  # a duration field of that message
        return None
    value: Duration = getattr(message, name)
    return value.seconds * 1_000_000_000 + value.nanos


def _step(step: workflow_pb2.StepDefinition) -> Json:
    form: dict[str, Json] = {
        "step_name": step.step_name,
        "executor_kind": step.executor_kind,
        "kind": step.kind,
        "kind_version": step.kind_version,
        "depends_on": list[Json](sorted(set(step.depends_on))),
    }
    if step.input_artifacts:
        form["input_artifacts"] = sorted(
            [each.name, each.from_step, each.from_name or each.name] for each in step.input_artifacts
        )  # type: ignore[assignment]  # lists of strings
    if step.secrets:
        form["secrets"] = {
            name: [each.provider, each.name, each.version] for name, each in step.secrets.items()
        }
    if step.required_labels:
        form["required_labels"] = dict(step.required_labels)
    if step.HasField("retry"):
        form["retry"] = _retry(step.retry)
    for name in ("timeout", "attempt_timeout", "progress_timeout", "schedule_timeout", "cancel_grace"):
        form[name] = _nanos(step, name)
    form = _without_empty(form)
    if step.HasField("input_template"):  # kept even when null: it is an input of its own
        form["input_template"] = loads_exact(step.input_template.data)
    return form


def _retry(policy: workflow_pb2.RetryPolicy) -> Json:
    form: dict[str, Json] = {
        "max_attempts": policy.max_attempts or None,
        "initial_backoff": _nanos(policy, "initial_backoff"),
        "max_backoff": _nanos(policy, "max_backoff"),
        "backoff_multiplier": repr(policy.backoff_multiplier) if policy.backoff_multiplier else None,
        "terminal_codes": list[Json](sorted(set(policy.terminal_codes))),
    }
    return _without_empty(form)
