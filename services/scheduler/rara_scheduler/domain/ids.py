"""Ids from the wire: opaque to callers, UUIDs to us; what cannot be one names nothing."""

import uuid
from typing import Final

from rara_scheduler.domain.errors import Code, Fault, field_invalid

MAX_ID_CHARS: Final = 64


def _canonical(text: str) -> str | None:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


def _given_id(text: str, path: str, code: Code, what: str) -> str:
    if not text:
        raise field_invalid(path, "is empty")
    if len(text) > MAX_ID_CHARS:
        raise field_invalid(path, f"must be at most {MAX_ID_CHARS} characters")
    known = _canonical(text)
    if known is None:
        raise not_found(code, what, path, text)
    return known


def not_found(code: Code, what: str, field: str, given: str) -> Fault:
    """The fault for an id that names nothing."""
    shown = given if given.isascii() and given.isprintable() else "(not an id)"
    return Fault(code, f"there is no {what} {shown}", metadata={field: shown})


def run_not_found(workflow_run_id: str) -> Fault:
    return not_found(Code.RUN_NOT_FOUND, "run", "workflow_run_id", workflow_run_id)


def step_not_found(step_run_id: str) -> Fault:
    return not_found(Code.STEP_NOT_FOUND, "step", "step_run_id", step_run_id)


def executor_not_found(executor_id: str) -> Fault:
    return not_found(Code.EXECUTOR_NOT_FOUND, "executor", "executor_id", executor_id)


def run_id(text: str) -> str:
    """A run's id in canonical form. Raises FIELD_INVALID when empty or too long, RUN_NOT_FOUND when it is no UUID."""
    return _given_id(text, "workflow_run_id", Code.RUN_NOT_FOUND, "run")


def step_id(text: str) -> str:
    """As `run_id`, for a step run; STEP_NOT_FOUND."""
    return _given_id(text, "step_run_id", Code.STEP_NOT_FOUND, "step")


def executor_id(text: str) -> str:
    """As `run_id`, for an executor; EXECUTOR_NOT_FOUND."""
    return _given_id(text, "executor_id", Code.EXECUTOR_NOT_FOUND, "executor")


def is_uuid(text: str) -> bool:
    """Whether the text is a UUID as we write it: lower case, with hyphens."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
