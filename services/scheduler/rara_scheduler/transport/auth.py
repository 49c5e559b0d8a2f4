"""Every call is asked for its token before it is served, and streams end when their token does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.routing import Offer
from rara_scheduler.domain.tokens import Role, Token, allows_kind
from rara_scheduler.store.database import Conflict
from rara_scheduler.store.sessions import AnothersExecutor
from rara_scheduler.transport.authenticator import Authenticator, Credential, invalid
from rara_scheduler.transport.roles import ALLOWED, OPEN, may_call
from rara_scheduler.transport.status import abort

log = structlog.get_logger(__name__)

# Of the call that is served by this task; None where nobody is asked.
CALLER: Final[ContextVar[Token | None]] = ContextVar("caller", default=None)

Handler = Any  # grpc.RpcMethodHandler: generic, and of another shape in its stubs
Details = grpc.HandlerCallDetails
Continuation = Callable[[Details], Awaitable[Handler]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(self, continuation: Continuation, handler_call_details: Details) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method in OPEN:
            return handler  # None: there is no such method, which everybody may know
        try:
            credential = await self._authenticator.authenticate(_authorization(handler_call_details))
            require(credential.token, method)
        except Fault as fault:
            log.info("call.refused", method=method, code=str(fault.code), reason=fault.message)
            return refusing(handler, fault)
        except Conflict:
            return refusing(
                handler, Fault(Code.STORE_UNAVAILABLE, "met other transactions", retry_after_s=0.2)
            )
        return self._serving(handler, credential)

    def _serving(self, handler: Handler, credential: Credential) -> Handler:
        """The same method, served for whoever has this credential."""
        token = credential.token
        if not handler.request_streaming and not handler.response_streaming:

            async def answer(request: Any, context: Any) -> Any:
                CALLER.set(token)
                return await handler.unary_unary(request, context)

            return _like(handler, answer)

        async def serve(request: Any, context: Any) -> Any:
            CALLER.set(token)
            with self._authenticator.serving(credential) as call:
                return await _until(call.over, _behaviour(handler), request, context)

        return _like(handler, serve)


def require(token: Token, method: str) -> None:
    """Raises Fault when the token's role may not call the method."""
    if not may_call(token.role, method):
        allowed = ", ".join(sorted(ALLOWED.get(method, ()))) or "nobody"
        raise Fault(
            Code.NOT_ALLOWED,
            f"a token of the role {token.role} may not call {method}",
            metadata={"role": token.role, "method": method, "allowed": allowed},
        )


def require_claim(offer: Offer) -> None:
    """Raises Fault when an executor offers what its token does not allow."""
    token = CALLER.get()
    if token is None:
        return
    if token.executor_kind is not None and offer.executor_kind != token.executor_kind:
        raise Fault(
            Code.NOT_ALLOWED,
            f"hello.executor_kind: this token is for executors of the kind {token.executor_kind}",
            metadata={"field": "hello.executor_kind", "allowed": token.executor_kind},
        )
    for index, capability in enumerate(offer.capabilities):
        if not allows_kind(token.kinds, capability.kind):
            allowed = ", ".join(token.kinds)
            raise Fault(
                Code.NOT_ALLOWED,
                f"hello.capabilities[{index}].kind: this token is for {allowed}, not for {capability.kind}",
                metadata={"field": f"hello.capabilities[{index}].kind", "allowed": allowed},
            )


def bearer() -> str | None:
    """The name of whoever calls; None where nobody is asked."""
    token = CALLER.get()
    return None if token is None else token.name


def require_bearer(name: str | None) -> None:
    """Raises Fault when the session of an executor_id is that of another bearer, or of none."""
    if bearer() != name:
        raise AnothersExecutor


def uploads_under_lease() -> Token | None:
    """The caller's token where it may upload under a lease of its own alone; None: it may upload at will."""
    token = CALLER.get()
    return token if token is not None and token.role is Role.EXECUTOR else None


async def _until(
    over: asyncio.Event, behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any
) -> Any:
    """Serve a stream until it ends or its token does."""
    work = asyncio.ensure_future(behaviour(request, context))
    end = asyncio.create_task(over.wait(), name="end of a token")
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        await _stopped(work)
        await abort(context, invalid("the token was revoked, or has expired"))
    finally:
        end.cancel()
        await _stopped(work)


async def _stopped(work: "asyncio.Future[Any]") -> None:
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        work.exception()  # the call is over: nobody asks any more


def _behaviour(handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    """How a streaming method is served, as one coroutine."""
    if not handler.response_streaming:
        return handler.stream_unary  # type: ignore[no-any-return] # see Handler
    serve = handler.stream_stream if handler.request_streaming else handler.unary_stream

    async def drive(request: Any, context: Any) -> None:
        answer = serve(request, context)
        if not isinstance(answer, AsyncIterator):
            await answer  # it writes by itself
            return
        try:
            async for response in answer:
                await context.write(response)
        finally:
            close = getattr(answer, "aclose", None)
            if close is not None:
                await close()

    return drive


def refusing(handler: Handler, fault: Fault) -> Handler:
    """A method of the same kind that ends each call with the fault, and reads no request."""

    async def refuse(_request: Any, context: Any) -> None:
        await abort(context, fault)

    return _like(handler, refuse, request_deserializer=None)


_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _like(handler: Handler, behaviour: Any, **changed: Any) -> Handler:
    make = _KINDS[handler.request_streaming, handler.response_streaming]
    values = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    return make(behaviour, **(values | changed))


def _authorization(details: Details) -> list[str]:
    return [
        value if isinstance(value, str) else value.decode("ascii", errors="replace")
        for key, value in details.invocation_metadata or ()
        if key == "authorization"
    ]
