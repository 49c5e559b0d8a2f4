"""The one place where codes become gRPC statuses, and where servicer methods get their bounds."""

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.payload import clean_text
from rara_scheduler.store.database import Conflict, DataRefused

log = structlog.get_logger(__name__)

DOMAIN: Final = "rara.v1"
# Where the caller set no deadline. Longer ones of the caller are cut to it as well: nothing we do takes longer.
CALL_TIMEOUT_S: Final = 30.0
# Statuses travel in trailers, for which peers commonly take 8 KiB in all, written in base64.
_MAX_MESSAGE_BYTES: Final = 1024
_MAX_DETAIL_BYTES: Final = 3 * 1024

_S = grpc.StatusCode

STATUS: Final[dict[Code, grpc.StatusCode]] = {
    # What ends an attempt has no status of its own: should one of these ever end a call, it is a fault of ours.
    Code.HANDLER_FAILED: _S.INTERNAL,
    Code.HANDLER_PANIC: _S.INTERNAL,
    Code.RUNNER_CRASHED: _S.INTERNAL,
    Code.OUT_OF_MEMORY: _S.INTERNAL,
    Code.DEPENDENCY_UNAVAILABLE: _S.UNAVAILABLE,
    Code.LEASE_EXPIRED: _S.FAILED_PRECONDITION,
    Code.ATTEMPT_TIMEOUT: _S.DEADLINE_EXCEEDED,
    Code.PROGRESS_TIMEOUT: _S.DEADLINE_EXCEEDED,
    Code.DISPATCH_LOST: _S.UNAVAILABLE,
    Code.INPUT_INVALID: _S.INVALID_ARGUMENT,
    Code.ARTIFACT_MISSING: _S.FAILED_PRECONDITION,
    Code.SECRET_UNRESOLVED: _S.FAILED_PRECONDITION,
    Code.ATTEMPTS_EXHAUSTED: _S.FAILED_PRECONDITION,
    Code.DEADLINE_EXCEEDED: _S.DEADLINE_EXCEEDED,
    Code.CANCELLED: _S.CANCELLED,
    Code.SIBLING_FAILED: _S.CANCELLED,
    Code.UPSTREAM_FAILED: _S.FAILED_PRECONDITION,
    Code.NO_CAPABLE_EXECUTOR: _S.FAILED_PRECONDITION,
    # Column A of the contract.
    Code.RATE_LIMITED: _S.RESOURCE_EXHAUSTED,
    Code.INTERNAL: _S.INTERNAL,
    Code.ARTIFACT_MISMATCH: _S.INVALID_ARGUMENT,
    Code.EXECUTOR_SHUTDOWN: _S.UNAVAILABLE,
    Code.UNSUPPORTED_KIND: _S.UNIMPLEMENTED,
    Code.NO_CAPACITY: _S.RESOURCE_EXHAUSTED,
    Code.PAYLOAD_INVALID: _S.INVALID_ARGUMENT,
    Code.PAYLOAD_TOO_LARGE: _S.INVALID_ARGUMENT,
    Code.ARTIFACT_TOO_LARGE: _S.INVALID_ARGUMENT,
    Code.QUOTA_EXCEEDED: _S.RESOURCE_EXHAUSTED,
    Code.LEASE_LOST: _S.FAILED_PRECONDITION,
    Code.BLOBS_MISSING: _S.FAILED_PRECONDITION,
    Code.FIELD_INVALID: _S.INVALID_ARGUMENT,
    # Reasons of the API alone.
    Code.DEFINITION_INVALID: _S.INVALID_ARGUMENT,
    Code.SECRET_IN_PAYLOAD: _S.INVALID_ARGUMENT,
    Code.PAGE_TOKEN_INVALID: _S.INVALID_ARGUMENT,
    Code.DEFINITION_NOT_FOUND: _S.NOT_FOUND,
    Code.KIND_NOT_FOUND: _S.NOT_FOUND,
    Code.RUN_NOT_FOUND: _S.NOT_FOUND,
    Code.STEP_NOT_FOUND: _S.NOT_FOUND,
    Code.EXECUTOR_NOT_FOUND: _S.NOT_FOUND,
    Code.ARTIFACT_NOT_FOUND: _S.NOT_FOUND,
    Code.UPLOAD_NOT_FOUND: _S.NOT_FOUND,
    Code.LEASE_UNKNOWN: _S.NOT_FOUND,
    Code.IDEMPOTENCY_CONFLICT: _S.ALREADY_EXISTS,
    Code.RUN_NOT_RETRYABLE: _S.FAILED_PRECONDITION,
    Code.PROTOCOL_VERSION_UNSUPPORTED: _S.FAILED_PRECONDITION,
    Code.REVISION_COMPACTED: _S.OUT_OF_RANGE,
    Code.QUEUE_FULL: _S.RESOURCE_EXHAUSTED,
    Code.STORE_UNAVAILABLE: _S.UNAVAILABLE,
    Code.POOL_TIMEOUT: _S.UNAVAILABLE,
    Code.SHUTTING_DOWN: _S.UNAVAILABLE,
    Code.CREDENTIAL_INVALID: _S.UNAUTHENTICATED,
    Code.NOT_ALLOWED: _S.PERMISSION_DENIED,
    Code.FEATURE_DISABLED: _S.UNIMPLEMENTED,
    # At start, outside the wire; a call can meet it when a pooler was put before the database meanwhile.
    Code.POOLER_UNSUPPORTED: _S.FAILED_PRECONDITION,
    Code.SCHEMA_TOO_NEW: _S.FAILED_PRECONDITION,
    Code.SCHEMA_TOO_OLD: _S.FAILED_PRECONDITION,
}


def _packed(message: Message) -> AnyMessage:
    made = AnyMessage()
    made.Pack(message)
    return made


def _fields(fault: Fault) -> error_details_pb2.BadRequest:
    """The offending fields, as many as the trailers can carry; the first always."""
    made = error_details_pb2.BadRequest()
    for violation in fault.fields:
        made.field_violations.add(
            field=clean_text(violation.field, 512),
            description=clean_text(violation.description, 512),
            reason=violation.reason or str(fault.code),
        )
        if made.ByteSize() > _MAX_DETAIL_BYTES and len(made.field_violations) > 1:
            del made.field_violations[-1]
            break
    return made


def status_of(fault: Fault) -> status_pb2.Status:
    """google.rpc.Status of a fault: ErrorInfo always, BadRequest and RetryInfo where they help."""
    info = error_details_pb2.ErrorInfo(
        reason=str(fault.code),
        domain=DOMAIN,
        metadata={key: clean_text(value, 512) for key, value in fault.metadata.items()},
    )
    details = [_packed(info)]
    if fault.fields:
        details.append(_packed(_fields(fault)))
    if fault.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(fault.retry_after_s * 1000))
        details.append(_packed(retry))
    return status_pb2.Status(
        code=code_pb2.Code.Value(STATUS[fault.code].name),
        message=clean_text(fault.message, _MAX_MESSAGE_BYTES),
        details=details,
    )


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", fault: Fault) -> NoReturn:
    """End a call with the status of a fault. Never returns."""
    await context.abort_with_status(rpc_status.to_status(status_of(fault)))
    raise AssertionError("abort_with_status raises")


def internal_fault(method: str, error: BaseException) -> Fault:
    """What a caller sees of a bug: an id to look for in the log, never the error's text."""
    log_id = uuid.uuid4().hex
    log.error("call.failed", method=method, log_id=log_id, exc_info=error)
    return Fault(Code.INTERNAL, f"an internal error; its log id is {log_id}", metadata={"log_id": log_id})


def _fault_of(method: str, error: Exception) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, Conflict):
        return Fault(Code.STORE_UNAVAILABLE, "the call met other transactions; try again", retry_after_s=0.2)
    if isinstance(error, DataRefused):
        # Without its words: those about a row repeat what is in it.
        log.error("call.refused_by_database", method=method, sqlstate=error.sqlstate)
        return Fault(
            Code.FIELD_INVALID, f"the database cannot store a value of the request ({error.sqlstate})"
        )
    return internal_fault(method, error)


def _bound_s(context: "grpc.aio.ServicerContext[Any, Any]") -> float:
    left: float | None = context.time_remaining()
    return CALL_TIMEOUT_S if left is None else max(0.0, min(left, CALL_TIMEOUT_S))


_Servicer = TypeVar("_Servicer")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = TypeVar("_Context", bound="grpc.aio.ServicerContext[Any, Any]")


def answers(
    method: Callable[[_Servicer, _Request, _Context], Awaitable[_Response]],
) -> Callable[[_Servicer, _Request, _Context], Awaitable[_Response]]:
    """Wrap a unary servicer method: bound its time, turn what it raises into a status.

    The bound is the caller's deadline, at most CALL_TIMEOUT_S: the statement that runs when it passes is cancelled
    with the call.
    """

    @functools.wraps(method)
    async def wrapper(self: _Servicer, request: _Request, context: _Context) -> _Response:
        try:
            async with asyncio.timeout(_bound_s(context)):
                return await method(self, request, context)
        except TimeoutError:
            fault = Fault(
                Code.STORE_UNAVAILABLE, f"not answered within {CALL_TIMEOUT_S:g} s", retry_after_s=1.0
            )
        except Exception as error:
            fault = _fault_of(method.__qualname__, error)
        return await abort(context, fault)

    return wrapper


def streams(
    method: Callable[[_Servicer, _Request, _Context], AsyncIterator[_Response]],
) -> Callable[[_Servicer, _Request, _Context], AsyncIterator[_Response]]:
    """Wrap a servicer method that streams its answer: turn what it raises into a status. Its life is unbounded."""

    @functools.wraps(method)
    async def wrapper(self: _Servicer, request: _Request, context: _Context) -> AsyncIterator[_Response]:
        answer = method(self, request, context)
        try:
            async for response in answer:
                yield response
            return
        except Exception as error:
            fault = _fault_of(method.__qualname__, error)
        finally:
            close = getattr(answer, "aclose", None)
            if close is not None:
                await close()
        await abort(context, fault)

    return wrapper
