"""Making calls: deadline, credential, repeats where they are safe, faults as typed errors."""

from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol, TypeVar

import grpc.aio

from rara_client.errors import from_rpc_error, may_resume
from rara_client.pacing import Pacing

Metadata = tuple[tuple[str, str], ...]
Q = TypeVar("Q", contravariant=True)
R = TypeVar("R", covariant=True)


class UnaryMethod(Protocol[Q, R]):
    """A unary method of a generated stub."""

    def __call__(
        self, request: Q, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Awaitable[R]: ...


class PageRequest(Protocol):
    page_token: str


class Page(Protocol):
    next_page_token: str


PQ = TypeVar("PQ", bound=PageRequest)
PR = TypeVar("PR", bound=Page)
AnyQ = TypeVar("AnyQ")
AnyR = TypeVar("AnyR")


class Calls:
    """What all calls of one client share."""

    def __init__(self, metadata: Metadata, pacing: Pacing) -> None:
        self.metadata = metadata
        self.pacing = pacing

    async def unary(
        self,
        method: UnaryMethod[AnyQ, AnyR],
        request: AnyQ,
        *,
        is_repeatable: bool,
        timeout_s: float | None = None,
    ) -> AnyR:
        """Make one call; repeat it if that is safe and nobody could answer, as often as time and `Pacing` allow."""
        pacing = self.pacing
        end = pacing.clock() + (pacing.call_timeout_s if timeout_s is None else timeout_s)
        failures = 0
        while True:
            try:
                left_s = max(end - pacing.clock(), 0.001)
                return await method(request, timeout=left_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                fault = from_rpc_error(error)
                failures += 1
                pause_s = pacing.pause_s(failures, fault.retry_after_s)
                is_spent = failures > pacing.retries or pacing.clock() + pause_s >= end
                if not is_repeatable or not may_resume(fault) or is_spent:
                    raise fault from error
            await pacing.sleep(pause_s)

    async def pages(
        self, method: UnaryMethod[PQ, PR], request: PQ, timeout_s: float | None
    ) -> AsyncGenerator[PR, None]:
        """All pages of a list, each fetched when it is asked for; `timeout_s` bounds each."""
        while True:
            page = await self.unary(method, request, is_repeatable=True, timeout_s=timeout_s)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
