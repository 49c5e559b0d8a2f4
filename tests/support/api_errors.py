"""What a call was refused with, taken apart as a client would."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@dataclass(frozen=True)
class Refusal:
    """status, and of the details: ErrorInfo's reason and metadata, BadRequest's fields, RetryInfo's seconds."""

    status: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    descriptions: list[str]
    retry_after_s: float | None


async def refusal(call: Awaitable[Any]) -> Refusal:
    """Await a call that must fail, with a status of ours."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return taken_apart(error)
    raise AssertionError(f"the call was answered: {answer}")


def taken_apart(error: grpc.aio.AioRpcError) -> Refusal:
    status: Any = rpc_status.from_call(error)
    assert status is not None, f"a status without details: {error.code()} {error.details()}"
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry_after_s: float | None = None
    for packed in status.details:
        retry = error_details_pb2.RetryInfo()
        if packed.Is(info.DESCRIPTOR):
            packed.Unpack(info)
        elif packed.Is(bad.DESCRIPTOR):
            packed.Unpack(bad)
        elif packed.Is(retry.DESCRIPTOR):
            packed.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    assert info.domain == "rara.v1"
    return Refusal(
        status=error.code(),
        message=status.message,
        reason=info.reason,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad.field_violations],
        descriptions=[violation.description for violation in bad.field_violations],
        retry_after_s=retry_after_s,
    )
