"""Looks on at every gRPC call: counts it, and gives a span to calls that begin or change a run.

Our own, since the ready-made one says OK of a call that its client has cancelled, and never ends its span then.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from rara_scheduler.telemetry.port import Metrics, Tracing

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
Behavior = Callable[[Any, Any], Any]


class CallObserver(grpc.aio.ServerInterceptor):
    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method: whatever name a stranger has chosen is no label
        method = handler_call_details.method.lstrip("/")
        if handler.request_streaming or handler.response_streaming:
            return self._observed_stream(handler, method)
        return handler._replace(unary_unary=self._unary(handler.unary_unary, method))

    def _unary(self, inner: Behavior, method: str) -> Behavior:
        async def observed(request: Any, context: Any) -> Any:
            began_at = time.perf_counter()
            code = "OK"
            with self._tracing.call(method, request, context.invocation_metadata()) as span:
                try:
                    return await inner(request, context)
                except BaseException as error:
                    code = _code(error, context)
                    span.failed(code)
                    raise
                finally:
                    self._metrics.call_ended(method, code, time.perf_counter() - began_at)

        return observed

    def _observed_stream(self, handler: Any, method: str) -> Any:
        name = (
            f"{'stream' if handler.request_streaming else 'unary'}"
            f"_{'stream' if handler.response_streaming else 'unary'}"
        )
        inner: Behavior = getattr(handler, name)

        async def observed(request: Any, context: Any) -> Any:
            code = "OK"
            try:
                return await inner(request, context)
            except BaseException as error:
                code = _code(error, context)
                raise
            finally:
                self._metrics.call_ended(method, code, None)

        async def observed_answers(request: Any, context: Any) -> AsyncIterator[Any]:
            code = "CANCELLED"  # a generator that is closed early hears no error
            answers = inner(request, context)
            try:
                async for answer in answers:
                    yield answer
                code = "OK"
            except BaseException as error:
                code = _code(error, context)
                raise
            finally:
                self._metrics.call_ended(method, code, None)
                await answers.aclose()

        wrapped = observed_answers if inspect.isasyncgenfunction(inner) else observed
        return handler._replace(**{name: wrapped})


def _code(error: BaseException, context: Any) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code or grpc.StatusCode.UNKNOWN.value[0], "UNKNOWN")
