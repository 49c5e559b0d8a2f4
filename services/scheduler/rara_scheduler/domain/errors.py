"""Every stable code, what it means for a step, and the faults that calls end with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Code(StrEnum):
    """The codes of the contract. A released code keeps its meaning; handlers may bring codes of their own."""

    # What ends an attempt, a step, or both.
    HANDLER_FAILED = "HANDLER_FAILED"
    HANDLER_PANIC = "HANDLER_PANIC"
    RUNNER_CRASHED = "RUNNER_CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DEPENDENCY_UNAVAILABLE = "DEPENDENCY_UNAVAILABLE"
    RATE_LIMITED = "RATE_LIMITED"
    INTERNAL = "INTERNAL"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
    PROGRESS_TIMEOUT = "PROGRESS_TIMEOUT"
    ARTIFACT_MISMATCH = "ARTIFACT_MISMATCH"
    DISPATCH_LOST = "DISPATCH_LOST"
    EXECUTOR_SHUTDOWN = "EXECUTOR_SHUTDOWN"
    UNSUPPORTED_KIND = "UNSUPPORTED_KIND"
    NO_CAPACITY = "NO_CAPACITY"
    INPUT_INVALID = "INPUT_INVALID"
    ARTIFACT_MISSING = "ARTIFACT_MISSING"
    SECRET_UNRESOLVED = "SECRET_UNRESOLVED"  # noqa: S105 - a code, not a secret
    PAYLOAD_INVALID = "PAYLOAD_INVALID"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    ARTIFACT_TOO_LARGE = "ARTIFACT_TOO_LARGE"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    SIBLING_FAILED = "SIBLING_FAILED"
    UPSTREAM_FAILED = "UPSTREAM_FAILED"
    NO_CAPABLE_EXECUTOR = "NO_CAPABLE_EXECUTOR"
    # Answers to a frame.
    LEASE_LOST = "LEASE_LOST"
    BLOBS_MISSING = "BLOBS_MISSING"
    FIELD_INVALID = "FIELD_INVALID"
    # Reasons of calls alone.
    DEFINITION_INVALID = "DEFINITION_INVALID"
    SECRET_IN_PAYLOAD = "SECRET_IN_PAYLOAD"  # noqa: S105 - a code, not a secret
    PAGE_TOKEN_INVALID = "PAGE_TOKEN_INVALID"  # noqa: S105 - a code, not a secret
    DEFINITION_NOT_FOUND = "DEFINITION_NOT_FOUND"
    KIND_NOT_FOUND = "KIND_NOT_FOUND"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    STEP_NOT_FOUND = "STEP_NOT_FOUND"
    EXECUTOR_NOT_FOUND = "EXECUTOR_NOT_FOUND"
    ARTIFACT_NOT_FOUND = "ARTIFACT_NOT_FOUND"
    UPLOAD_NOT_FOUND = "UPLOAD_NOT_FOUND"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    IDEMPOTENCY_CONFLICT = "IDEMPOTENCY_CONFLICT"
    RUN_NOT_RETRYABLE = "RUN_NOT_RETRYABLE"
    PROTOCOL_VERSION_UNSUPPORTED = "PROTOCOL_VERSION_UNSUPPORTED"
    REVISION_COMPACTED = "REVISION_COMPACTED"
    QUEUE_FULL = "QUEUE_FULL"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    POOL_TIMEOUT = "POOL_TIMEOUT"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    CREDENTIAL_INVALID = "CREDENTIAL_INVALID"
    NOT_ALLOWED = "NOT_ALLOWED"
    FEATURE_DISABLED = "FEATURE_DISABLED"
    # At start, outside the wire.
    POOLER_UNSUPPORTED = "POOLER_UNSUPPORTED"
    SCHEMA_TOO_NEW = "SCHEMA_TOO_NEW"
    SCHEMA_TOO_OLD = "SCHEMA_TOO_OLD"


# Ends an attempt, spends nothing, makes the step available again at once.
FREE = frozenset({Code.DISPATCH_LOST, Code.EXECUTOR_SHUTDOWN, Code.UNSUPPORTED_KIND, Code.NO_CAPACITY})

# The executor may give a lease back with these, until `running` was sent.
REJECTION = frozenset({Code.EXECUTOR_SHUTDOWN, Code.UNSUPPORTED_KIND, Code.NO_CAPACITY})

# Not retried unless the error itself says so: the default where `JobError.retryable` is absent.
FINAL = frozenset(
    {
        Code.INPUT_INVALID,
        Code.ARTIFACT_MISSING,
        Code.SECRET_UNRESOLVED,
        Code.PAYLOAD_INVALID,
        Code.PAYLOAD_TOO_LARGE,
        Code.ARTIFACT_TOO_LARGE,
        Code.SECRET_IN_PAYLOAD,
    }
)

# A step that closes as `cancelled` for one of these makes its run `failed`, not `cancelled`.
FAILS_THE_RUN = frozenset({Code.DEADLINE_EXCEEDED, Code.NO_CAPABLE_EXECUTOR})


def retryable_by_default(code: str) -> bool:
    """Whether an error that does not say so itself may be retried. Unknown codes may."""
    return code not in FINAL


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field: `field` is its path as the caller spells it (`steps[2].depends_on[0]`)."""

    field: str
    description: str
    reason: str = ""  # a code, where it differs from the fault's


class Fault(Exception):
    """A call or frame that is refused on purpose.

    Carries a stable code, a message with ids and limits but never payloads or secrets, the offending fields,
    `metadata` for programs (keys spelled as the fields are) and, where waiting helps, `retry_after_s`.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        fields: tuple[FieldViolation, ...] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fields = fields
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s


def field_invalid(path: str, description: str, code: Code = Code.FIELD_INVALID) -> Fault:
    """One field that cannot be taken as it is."""
    return Fault(code, f"{path}: {description}", fields=(FieldViolation(path, description),))


@dataclass(frozen=True, slots=True)
class StepError:
    """The error of an attempt as it is stored: text is valid, redacted and cut; details are JSON text."""

    code: str
    message: str = ""
    retryable: bool | None = None
    details: str | None = None
    retry_after_s: float | None = None
    stack_trace: str = ""
    runner_exit: Mapping[str, int | bool] = field(default_factory=dict)

    def may_retry(self) -> bool:
        return retryable_by_default(self.code) if self.retryable is None else self.retryable
