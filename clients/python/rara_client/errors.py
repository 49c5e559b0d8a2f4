"""The faults that a call can end with, one class for each way a caller may want to go on.

Branch on the class or on `reason`, never on the message. A reason that this version does not know keeps the
class of its gRPC status, so a newer scheduler does not break an older caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_DOMAIN: Final = "rara.v1"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that was refused: its path as the API spells it, and why."""

    field: str
    description: str
    reason: str = ""


class RaraError(Exception):
    """A call that did not succeed.

    reason: the stable code, `RUN_NOT_FOUND`; the gRPC status' name where the other side gave none.
    status: the gRPC status' name, `NOT_FOUND`.
    metadata: ids and limits that belong to the fault, spelled as the fields are.
    retry_after_s: no sooner than this, if the scheduler said so.
    from_scheduler: the scheduler itself answered so; otherwise the connection or this client did.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        status: str,
        violations: tuple[FieldViolation, ...] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        from_scheduler: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.status = status
        self.violations = violations
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.from_scheduler = from_scheduler

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class InvalidArgument(RaraError):
    """The request cannot be right, whatever the state: mend it. `violations` names the fields."""


class DefinitionInvalid(InvalidArgument):
    """The definition breaks a rule: a cycle, an unknown step, a bad reference, a limit."""


class PayloadInvalid(InvalidArgument):
    """Not JSON, too large, or with text that cannot be stored."""


class SecretInPayload(InvalidArgument):
    """A raw secret where a reference belongs: names the path and the rule, never the value."""


class ArtifactMismatch(InvalidArgument):
    """Bytes do not have the digest or size that was named."""


class NotFound(RaraError):
    """There is no such definition, run, step, executor, artifact or upload."""


class AlreadyExists(RaraError):
    """The name is taken."""


class IdempotencyConflict(AlreadyExists):
    """The same idempotency key with other content: `metadata` names the run that has it."""


class Refused(RaraError):
    """The state forbids it, or a limit does, or it is switched off."""


class RevisionCompacted(Refused):
    """The changes after that revision are no longer kept one by one: watch again from 0."""


class Unauthenticated(RaraError):
    """No credential, or not a valid one."""


class NotAllowed(RaraError):
    """The credential does not allow this call."""


class Unavailable(RaraError):
    """The scheduler cannot be reached, or cannot reach its database, just now."""


class CallTimeout(RaraError):
    """The call's own deadline passed without an answer: whether it took effect is unknown."""


_BY_REASON: Final[Mapping[str, type[RaraError]]] = {
    "ARTIFACT_MISMATCH": ArtifactMismatch,
    "DEFINITION_INVALID": DefinitionInvalid,
    "IDEMPOTENCY_CONFLICT": IdempotencyConflict,
    "PAYLOAD_INVALID": PayloadInvalid,
    "PAYLOAD_TOO_LARGE": PayloadInvalid,
    "REVISION_COMPACTED": RevisionCompacted,
    "SECRET_IN_PAYLOAD": SecretInPayload,
}

_BY_STATUS: Final[Mapping[str, type[RaraError]]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": Refused,
    "OUT_OF_RANGE": Refused,
    "RESOURCE_EXHAUSTED": Refused,
    "UNIMPLEMENTED": Refused,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": NotAllowed,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": CallTimeout,
}


# How a broken connection looks when nobody on the other side said anything: a reset is seen as CANCELLED,
# INTERNAL or UNKNOWN, depending on where it hit.
_BROKEN: Final = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"})


def may_resume(fault: RaraError) -> bool:
    """Whether a stream that ended so may go on in another call."""
    return isinstance(fault, Unavailable) or (not fault.from_scheduler and fault.status in _BROKEN)


def from_rpc_error(error: grpc.aio.AioRpcError) -> RaraError:
    """Translate a failed call, with the details that its trailers carry."""
    status = error.code().name
    message = error.details() or "no details given"
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    has_info = has_retry = False
    for detail in _details(error):
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            has_info = info.domain == _DOMAIN
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            has_retry = retry.HasField("retry_delay")
    reason = str(info.reason) if has_info else status
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(status, RaraError)
    return kind(
        message,
        reason=reason,
        status=status,
        violations=tuple(
            FieldViolation(item.field, item.description, item.reason) for item in bad_request.field_violations
        ),
        metadata=dict(info.metadata) if has_info else None,
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds() if has_retry else None,
        from_scheduler=has_info,
    )


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """The packed details; none where the trailers hold no status, or one that is not ours to trust."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # a proxy answered, or changed what it passed on
        return []
    return list(status.details) if status is not None else []
