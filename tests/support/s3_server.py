"""A real S3 server, moto's, as a process of its own that can also fail on command.

    async with s3_server(tmp_path) as s3:
        bucket = await s3.new_bucket()
        await s3.fail("503 SlowDown", method="PUT", count=2)

Its faults come as answers; for those of the network put a `FaultProxy` before its address.
"""

import asyncio
import contextlib
import json
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rara_testing.processes import Processes

_CONTROL = "/_control/"
_ANSWER_S = 30.0
_SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=an-access-key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host"
)


class S3Server:
    def __init__(self, address: str) -> None:
        self.address = address

    def environment(self, address: str = "") -> dict[str, str]:
        """AWS's variables for a client of this server, or of a proxy before it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{address or self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret-key",
        }

    async def new_bucket(self) -> str:
        name = f"rara-{uuid.uuid4().hex[:12]}"
        await self._call("PUT", f"/{name}")
        return name

    async def put(self, bucket: str, key: str, data: bytes) -> None:
        """Behind the back of whoever uses the bucket."""
        await self._call("PUT", f"/{bucket}/{key}", data)

    async def uploads(self, bucket: str) -> int:
        """Multipart uploads that were begun, and neither completed nor aborted."""
        return (await self._call("GET", f"/{bucket}?uploads")).count(b"<UploadId>")

    async def fail(
        self,
        answer: str,
        *,
        method: str = "",
        key: str = "",
        count: int = 1,
        skip: int = 0,
        after: bool = False,
    ) -> None:
        """Give the next `count` requests, after `skip` more, another answer: a status and an error code.

        method, key: only requests of that method, or with that in their address. after: they are served first.
        """
        fault = {"answer": answer, "method": method, "key": key, "count": count, "skip": skip, "after": after}
        await self._call("POST", _CONTROL + "fail", json.dumps(fault).encode())

    async def heal(self) -> None:
        """No more faults."""
        await self._call("POST", _CONTROL + "heal")

    async def requests(self) -> list[str]:
        """Method and address of every request since the last call of this."""
        found: list[str] = json.loads(await self._call("POST", _CONTROL + "requests"))
        return found

    async def _call(self, method: str, target: str, data: bytes | None = None) -> bytes:
        def call() -> bytes:
            request = urllib.request.Request(f"http://{self.address}{target}", data=data, method=method)
            request.add_header("Content-Type", "application/octet-stream")
            request.add_header("Authorization", _SIGNATURE)  # there is one: moto looks no further
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                answer: bytes = response.read()
                return answer

        return await asyncio.to_thread(call)


@contextlib.asynccontextmanager
async def s3_server(folder: Path) -> AsyncIterator[S3Server]:
    async with Processes(folder) as processes:
        process = await processes.start("s3", [sys.executable, "-u", __file__])
        match = await process.expect_line(r"serving S3 at (\S+)", 60.0)
        yield S3Server(match[1])


# ---------------------------------------------------------------- in the process


class _FailingApp:
    """WSGI: the server itself, or the answer that a fault wants instead."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._faults: list[dict[str, Any]] = []
        self._seen: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith(_CONTROL):
            return self._control(path.removeprefix(_CONTROL), environ, start_response)
        target = f"{path}?{environ.get('QUERY_STRING', '')}".rstrip("?")
        self._seen.append(f"{environ['REQUEST_METHOD']} {target}")
        fault = self._due(environ["REQUEST_METHOD"], target)
        if fault is None:
            return self._app(environ, start_response)
        if fault["after"]:
            for _ in self._app(environ, lambda *_: None):
                pass
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        return _answer(fault["answer"], start_response)

    def _due(self, method: str, target: str) -> dict[str, Any] | None:
        for fault in self._faults:
            if fault["method"] not in ("", method) or fault["key"] not in target or not fault["count"]:
                continue
            if fault["skip"]:
                fault["skip"] -= 1
                continue
            fault["count"] -= 1
            return fault
        return None

    def _control(
        self, order: str, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterator[bytes]:
        answer = b""
        if order == "fail":
            self._faults.append(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
        elif order == "heal":
            self._faults.clear()
        else:
            answer = json.dumps(self._seen).encode()
            self._seen.clear()
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(answer)))])
        return iter([answer])


def _answer(answer: str, start_response: Callable[..., Any]) -> Iterator[bytes]:
    status, _, code = answer.partition(" ")
    body = (
        f"<Error><Code>{code}</Code><Message>on command</Message>"
        "<AWSAccessKeyId>an-access-key</AWSAccessKeyId></Error>"
    ).encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), ("ETag", '"none"')]
    start_response(f"{status} {code}", headers)
    return iter([body])


def _serve() -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    app = _FailingApp(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(f"serving S3 at 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
