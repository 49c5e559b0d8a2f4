"""How often one caller may make the calls that make work: a token bucket for each, in a table of bounded size."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.transport.auth import bearer
from rara_scheduler.transport.status import abort

MAX_CALLERS: Final = 10_000

# Calls that store something new. Reads are bounded by pages, streams by sessions, transfers by their own limits.
LIMITED: Final = frozenset(
    f"/rara.v1.{method}"
    for method in (
        "WorkflowService/RegisterDefinition",
        "WorkflowService/StartRun",
        "WorkflowService/BatchStartRuns",
        "WorkflowService/RetryRun",
        "ArtifactService/CreateUpload",
    )
)

_BATCH: Final = "/rara.v1.WorkflowService/BatchStartRuns"  # counts as the runs that it asks for

Handler = Any  # grpc.RpcMethodHandler: generic, and of another shape in its stubs
Details = grpc.HandlerCallDetails


class Rates:
    """Buckets by caller, each full at first. per_s: calls that flow in; burst: calls that a bucket holds."""

    def __init__(self, per_s: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, as of when

    def take(self, caller: str, calls: int = 1) -> float:
        """Take as many calls, or a full bucket for more than that: 0, or the seconds until they are there to take.

        The callers who were quiet for longest are forgotten first. Whoever comes under many names gets a full bucket
        for each: names are to be had from an operator, addresses are not ours to give.
        """
        now = self._clock()
        left, at = self._buckets.pop(caller, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        cost = float(min(max(1, calls), self._burst))
        wait_s = 0.0 if left >= cost else (cost - left) / self._per_s
        self._buckets[caller] = (left if wait_s else left - cost, now)
        while len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return wait_s


class RateInterceptor(grpc.aio.ServerInterceptor):
    """Inside of authentication, where that is on: a caller is a token's name, else an address."""

    def __init__(self, rates: Rates, per_s: float) -> None:
        self._rates = rates
        self._per_s = per_s

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in LIMITED:
            return handler

        is_batch = handler_call_details.method == _BATCH

        async def answer(request: Any, context: Any) -> Any:
            calls = len(request.requests) if is_batch else 1
            wait_s = self._rates.take(bearer() or peer_host(context.peer()), calls)
            if wait_s:
                await abort(context, self._fault(wait_s))
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _fault(self, wait_s: float) -> Fault:
        return Fault(
            Code.RATE_LIMITED,
            f"more than {self._per_s:g} calls a second that make work, each run of a batch counted",
            metadata={"rate_limit_per_s": f"{self._per_s:g}"},
            retry_after_s=max(0.001, wait_s),  # shown in milliseconds
        )


def peer_host(peer: str) -> str:
    """Of gRPC's name of a peer, `ipv4:10.0.0.5:4711`, what stays the same over its connections."""
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]
