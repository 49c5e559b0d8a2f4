"""Handlers run in this process, without a scheduler: for unit tests and debuggers.

    async def test_it_counts() -> None:
        run = await run_handler(count_words, {"language": "en"}, artifacts={"corpus": b"to be or not to be"})
        assert run.output == {"words": 6}
        assert run.artifacts["index"].data.startswith(b"...")

What a handler raises comes out of run_handler as it was raised.
"""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rara_executor import payload
from rara_executor.artifact_files import keep_bytes, sha256_of
from rara_executor.errors import JobFailure
from rara_executor.handlers import Handlers
from rara_executor.job import BlockingJob, Job
from rara_executor.registry import AsyncHandler, BlockingHandler, Handler, Operation, Registry, is_async
from rara_executor.runner_protocol import (
    Failed,
    FromRunner,
    InputInfo,
    LogLine,
    OpenArtifact,
    Progress,
    PutArtifact,
    RecordEffect,
    Reply,
    Request,
    StartJob,
)


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    data: bytes
    type: str
    media_type: str
    metadata: Any


@dataclass(frozen=True, slots=True)
class Report:
    """One call of progress."""

    fraction: float | None
    message: str
    metrics: Mapping[str, float]
    checkpoint: Any
    artifacts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class HandlerRun:
    """What a handler did. output: as the next step would read it, through JSON."""

    output: Any = None
    progress: list[Report] = field(default_factory=list)
    artifacts: dict[str, StoredArtifact] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    effects: dict[str, Any] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)


async def run_handler(
    handler: Handler,
    input: object = None,  # noqa: A002 - the contract's name
    *,
    artifacts: Mapping[str, bytes | Path] | None = None,
    metadata: Mapping[str, object] | None = None,
    secrets: Mapping[str, str] | None = None,
    checkpoint: object = None,
    checkpoint_artifacts: Mapping[str, bytes | Path] | None = None,
    effects: Mapping[str, object] | None = None,
    input_schema: Mapping[str, object] | None = None,
    attempt: int = 1,
    step_name: str = "step",
    idempotency_key: str = "test-key",
    time_left_s: float | None = None,
) -> HandlerRun:
    """Run a handler, async or blocking (in a thread), as one attempt.

    artifacts: input artifacts by name; metadata: theirs. effects: what earlier attempts recorded by once().
    Raises what the handler raises; JobFailure with INPUT_INVALID or PAYLOAD_INVALID where the executor would.
    """
    with tempfile.TemporaryDirectory(prefix="rara-test-") as folder:
        inputs = _Inputs(Path(folder) / "inputs", artifacts or {}, metadata or {})
        carried = _Inputs(Path(folder) / "checkpoint", checkpoint_artifacts or {}, {})
        start = StartJob(
            lease_token=1,
            step_run_id="test-step-run",
            workflow_run_id="test-run",
            step_name=step_name,
            definition="test",
            attempt=attempt,
            idempotency_key=idempotency_key,
            failures=attempt - 1,
            max_attempts=3,
            kind="test",
            kind_version="0",
            time_left_s=time_left_s,
            inputs=inputs.infos,
            secrets=dict(secrets or {}),
            effects={name: json.dumps(value) for name, value in (effects or {}).items()},
            scratch=str(Path(folder) / "scratch"),
            max_payload_bytes=payload.MAX_PAYLOAD_BYTES,
            input=payload.encode(input, what="input"),
            checkpoint=None if checkpoint is None else payload.encode(checkpoint, what="checkpoint"),
            checkpoint_artifacts=carried.infos,
        )
        _check_input(handler, input_schema, start)
        local = _Local(inputs, carried)
        if is_async(handler):
            value = await cast("AsyncHandler", handler)(Job(start, _AsyncPort(local)))
        else:
            blocking = cast("BlockingHandler", handler)
            value = await asyncio.to_thread(blocking, BlockingJob(start, _BlockingPort(local)))
        local.run.output = payload.decode(payload.encode(value, what="output"))
        return local.run


def _check_input(handler: Handler, schema: Mapping[str, object] | None, start: StartJob) -> None:
    registry = Registry()
    registry.add(
        Operation(
            kind=start.kind,
            version=start.kind_version,
            handler=handler,
            input_schema=schema,
            max_concurrency=0,
            is_async=is_async(handler),
        )
    )
    found = Handlers(registry).find(start)
    if isinstance(found, Failed):
        raise JobFailure(found.code, found.message)


class _Inputs:
    def __init__(
        self, folder: Path, artifacts: Mapping[str, bytes | Path], metadata: Mapping[str, object]
    ) -> None:
        folder.mkdir()
        self.paths: dict[str, Path] = {}
        self.infos: list[InputInfo] = []
        for number, (name, given) in enumerate(artifacts.items()):
            path = given if isinstance(given, Path) else keep_bytes(given, folder / str(number)).path
            self.paths[name] = path
            sha256, size = sha256_of(path)
            text = json.dumps(metadata[name]) if name in metadata else ""
            self.infos.append(InputInfo(name, sha256, size, "application/octet-stream", "blob", text))


class _Local:
    """Answers a handler's messages as a supervisor would that reaches its scheduler at once."""

    def __init__(self, inputs: _Inputs, carried: _Inputs) -> None:
        self.run = HandlerRun()
        self._inputs = inputs
        self._carried = carried
        self._kept = {info.sha256: carried.paths[info.name] for info in carried.infos}

    def take(self, message: FromRunner) -> None:
        match message:
            case Progress():
                checkpoint = None if message.checkpoint is None else payload.decode(message.checkpoint)
                kept = {name: self._kept.get(key, Path(key)).read_bytes() for name, key in message.artifacts}
                report = Report(message.fraction, message.message, message.metrics, checkpoint, kept)
                self.run.progress.append(report)
            case LogLine():
                self.run.logged.append(message.event)
            case _:
                pass

    def answer(self, message: Request) -> Reply:
        path = ""
        match message:
            case OpenArtifact(of_checkpoint=True):
                path = str(self._carried.paths[message.name])
            case PutArtifact(for_checkpoint=True):
                pass  # its bytes are in the scratch folder
            case OpenArtifact():
                path = str(self._inputs.paths[message.name])
                self.run.opened.append(message.name)
            case PutArtifact():
                metadata = json.loads(message.metadata) if message.metadata else None
                self.run.artifacts[message.name] = StoredArtifact(
                    Path(message.path).read_bytes(), message.type, message.media_type, metadata
                )
            case RecordEffect():
                self.run.effects[message.name] = payload.decode(message.result)
        return Reply(message.lease_token, message.request, path, "", "")


class _AsyncPort:
    def __init__(self, local: _Local) -> None:
        self._local = local
        self._numbers = itertools.count(1)

    def post(self, message: FromRunner) -> None:
        self._local.take(message)

    async def send(self, message: FromRunner) -> None:
        self._local.take(message)
        await asyncio.sleep(0)

    async def request(self, message: Request) -> Reply:
        return self._local.answer(message)

    def next_request(self) -> int:
        return next(self._numbers)


class _BlockingPort:
    def __init__(self, local: _Local) -> None:
        self._local = local
        self._numbers = itertools.count(1)

    def post(self, message: FromRunner) -> None:
        self._local.take(message)

    def send(self, message: FromRunner) -> None:
        self._local.take(message)

    def request(self, message: Request) -> Reply:
        return self._local.answer(message)

    def next_request(self) -> int:
        return next(self._numbers)
