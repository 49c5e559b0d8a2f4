"""What a failed call of ArtifactService means for a transfer: to be tried again, or the end of it."""

import asyncio
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rara_executor.codes import Code
from rara_executor.errors import JobFailure

_DOMAIN: Final = "rara.v1"

# How a broken connection looks when nobody on the other side said anything: a reset is seen as one of several,
# depending on where it hit.
_BROKEN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_AWAY: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """failure: how the attempt ends if the transfer is not tried again. retry_after_s: no sooner than this."""

    failure: JobFailure
    is_final: bool = False
    retry_after_s: float = 0.0


def fault_of(error: Exception) -> Fault:
    if isinstance(error, TimeoutError | asyncio.InvalidStateError):
        return _away("the artifact service does not answer")
    if not isinstance(error, grpc.aio.AioRpcError):
        raise TypeError(f"no fault of a call: {error!r}")
    info, retry_after_s = _details(error)
    text = error.details() or "no details given"
    match info.reason:
        case "QUOTA_EXCEEDED":
            return Fault(JobFailure(Code.QUOTA_EXCEEDED, text), retry_after_s=retry_after_s)
        case "ARTIFACT_TOO_LARGE":
            return Fault(JobFailure(Code.ARTIFACT_TOO_LARGE, text), is_final=True)
        case "QUEUE_FULL" | "RATE_LIMITED":
            return _away(f"the artifact service is busy: {text}", retry_after_s)
        case "UPLOAD_NOT_FOUND":
            return _away(f"the upload is gone: {text}")  # begin another one
        case "FIELD_INVALID" if "committed_bytes" in info.metadata:
            return _away(f"another call has written to the upload: {text}")
    return _by_status(error.code(), text, retry_after_s, is_ours=bool(info.reason))


def _by_status(code: grpc.StatusCode, text: str, retry_after_s: float, *, is_ours: bool) -> Fault:
    if code in (_AWAY if is_ours else _BROKEN):
        return _away(f"the artifact service is away: {text}", retry_after_s)
    match code:
        case grpc.StatusCode.NOT_FOUND:
            return Fault(JobFailure(Code.ARTIFACT_MISSING, f"the artifact is gone: {text}"), is_final=True)
        case grpc.StatusCode.INVALID_ARGUMENT:
            refused = f"the artifact service refused the blob: {text}"
            return Fault(JobFailure(Code.ARTIFACT_MISMATCH, refused), is_final=True)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Fault(JobFailure(Code.LEASE_LOST, f"the lease is not current: {text}"), is_final=True)
    failed = f"the artifact service failed with {code.name}: {text}"
    return Fault(JobFailure(Code.INTERNAL, failed), is_final=True)


def _away(text: str, retry_after_s: float = 0.0) -> Fault:
    return Fault(JobFailure(Code.DEPENDENCY_UNAVAILABLE, text), retry_after_s=retry_after_s)


def _details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, float]:
    """ErrorInfo, empty where there is none of ours, and the least wait."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # a proxy answered, or changed what it passed on
        status = None
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
    if info.domain != _DOMAIN:
        info = error_details_pb2.ErrorInfo()
    return info, retry.retry_delay.ToTimedelta().total_seconds()
