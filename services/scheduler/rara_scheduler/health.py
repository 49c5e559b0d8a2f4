"""Asks the scheduler of this machine whether it serves: `python -m rara_scheduler.health`, a container's health check.

It asks at the port of RARA_LISTEN, by grpc.health.v1; exit code 0 while it serves.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - read, not listened on


def own_address(listen: str) -> str:
    """Where a process beside it reaches a scheduler with this RARA_LISTEN."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


def main() -> None:
    address = own_address(os.environ.get("RARA_LISTEN", "127.0.0.1:7310"))
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            sys.exit(f"{address}: {error.code().name}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


if __name__ == "__main__":
    main()
