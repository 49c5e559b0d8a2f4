"""Who may dial this executor: certificates and tokens of its own port."""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from rara_client.certificates import ServerCertificates
from rara_client.channel import is_loopback
from rara_client.security import TokenFile

from rara_executor.codes import Code

if TYPE_CHECKING:
    from rara_executor.settings import Settings

log = structlog.get_logger(__name__)

_OPEN: Final = "/grpc.health.v1.Health/Check"  # what probes ask

Handler = Any  # grpc.RpcMethodHandler: generic, and of another shape in its stubs
Details = grpc.HandlerCallDetails


@dataclass(frozen=True, slots=True)
class Door:
    """Without anything: plain text, open to all. tokens: with one of these a caller is let in."""

    certificates: ServerCertificates | None = None
    tokens: TokenFile | None = None

    @classmethod
    def of(cls, settings: "Settings") -> Self:
        """Raises ConfigurationError where the files cannot be used."""
        from rara_executor.errors import ConfigurationError

        certificates = None
        tokens = None if settings.direct_token_file is None else TokenFile(settings.direct_token_file)
        try:
            if settings.tls_cert is not None and settings.tls_key is not None:
                certificates = ServerCertificates(
                    settings.tls_cert, settings.tls_key, settings.tls_client_ca, on_reload=_log_reload
                )
            if tokens is not None:
                tokens.tokens()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return cls(certificates, tokens)

    def open(self, server: grpc.aio.Server, listen: str) -> int:
        """The port. Raises RuntimeError where it cannot be had."""
        if self.certificates is not None:
            return server.add_secure_port(listen, self.certificates.credentials())
        if not is_loopback(listen):
            log.warning(
                "executor.exposed", what=f"RARA_EXECUTOR_LISTEN={listen} is beyond loopback, in plain text"
            )
        return server.add_insecure_port(listen)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [] if self.tokens is None else [_Doorkeeper(self.tokens)]


class _Doorkeeper(grpc.aio.ServerInterceptor):
    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == _OPEN or self._knows(handler_call_details):
            return handler
        log.warning("executor.caller_refused", method=handler_call_details.method)
        return _refusing(handler)

    def _knows(self, details: Details) -> bool:
        """Compared with each, in constant time, so that the time tells nothing about any."""
        shown = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(shown) != 1:
            return False
        value = shown[0] if isinstance(shown[0], bytes) else shown[0].encode()
        expected = [f"Bearer {token}".encode() for token in self._tokens.tokens()]
        return any([hmac.compare_digest(value, one) for one in expected])  # noqa: C419 - all of them


def _refusing(handler: Handler) -> Handler:
    async def refuse(_request: Any, context: Any) -> None:
        info = any_pb2.Any()
        info.Pack(error_details_pb2.ErrorInfo(reason=Code.CREDENTIAL_INVALID, domain="rara.v1"))
        status = status_pb2.Status(
            code=code_pb2.UNAUTHENTICATED,
            message="the call carries no token of RARA_DIRECT_TOKEN_FILE",
            details=[info],
        )
        await context.abort_with_status(rpc_status.to_status(status))

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(refuse, response_serializer=handler.response_serializer)


def _log_reload(problem: str) -> None:
    if problem:
        log.error("certificates.not_reloaded", error=problem)
    else:
        log.info("certificates.reloaded")
