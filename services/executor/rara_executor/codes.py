"""The released codes of errors, refusals and reasons that an executor meets on the wire."""

import re
from enum import StrEnum


class Code(StrEnum):
    """Codes of the contract, spelled as they cross the wire."""

    HANDLER_FAILED = "HANDLER_FAILED"
    RUNNER_CRASHED = "RUNNER_CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DEPENDENCY_UNAVAILABLE = "DEPENDENCY_UNAVAILABLE"
    RATE_LIMITED = "RATE_LIMITED"
    INTERNAL = "INTERNAL"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
    PROGRESS_TIMEOUT = "PROGRESS_TIMEOUT"
    ARTIFACT_MISMATCH = "ARTIFACT_MISMATCH"
    ARTIFACT_MISSING = "ARTIFACT_MISSING"
    EXECUTOR_SHUTDOWN = "EXECUTOR_SHUTDOWN"
    UNSUPPORTED_KIND = "UNSUPPORTED_KIND"
    NO_CAPACITY = "NO_CAPACITY"
    INPUT_INVALID = "INPUT_INVALID"
    SECRET_UNRESOLVED = "SECRET_UNRESOLVED"  # noqa: S105 - a code, not a secret
    SECRET_IN_PAYLOAD = "SECRET_IN_PAYLOAD"  # noqa: S105 - a code, not a secret
    PAYLOAD_INVALID = "PAYLOAD_INVALID"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    ARTIFACT_TOO_LARGE = "ARTIFACT_TOO_LARGE"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    LEASE_LOST = "LEASE_LOST"
    BLOBS_MISSING = "BLOBS_MISSING"
    FIELD_INVALID = "FIELD_INVALID"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    PROTOCOL_VERSION_UNSUPPORTED = "PROTOCOL_VERSION_UNSUPPORTED"
    CREDENTIAL_INVALID = "CREDENTIAL_INVALID"


# What a handler may not say of itself: these name facts that only the executor or the scheduler knows.
_NOT_FOR_HANDLERS = frozenset(
    {
        "RUNNER_CRASHED",
        "HANDLER_PANIC",
        "LEASE_EXPIRED",
        "LEASE_LOST",
        "ATTEMPT_TIMEOUT",
        "PROGRESS_TIMEOUT",
        "DISPATCH_LOST",
        "EXECUTOR_SHUTDOWN",
        "UNSUPPORTED_KIND",
        "NO_CAPACITY",
        "NO_CAPABLE_EXECUTOR",
        "ATTEMPTS_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "SIBLING_FAILED",
        "UPSTREAM_FAILED",
        "BLOBS_MISSING",
        "FIELD_INVALID",
    }
)

MAX_CODE_CHARS = 63
_HANDLER_CODE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")


def is_handler_code(code: object) -> bool:
    """Whether a handler may fail with this code: two words or more, upper snake case, not ours alone."""
    return (
        isinstance(code, str)
        and len(code) <= MAX_CODE_CHARS
        and _HANDLER_CODE.fullmatch(code) is not None
        and code not in _NOT_FOR_HANDLERS
    )
