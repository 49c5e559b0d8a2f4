"""Runs blocking operations in this process: a job whose scheduler is a few dictionaries.

For the logic of operations. What leases, runners and uploads do is for the system tests.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rara_executor import BlockingJob
from rara_executor.artifact_files import sha256_of
from rara_executor.runner_protocol import (
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


class Killed(BaseException):
    """Raised in the handler where its process is to end."""


@dataclass
class StoredArtifact:
    path: Path
    info: InputInfo

    @property
    def metadata(self) -> Any:
        return json.loads(self.info.metadata)


@dataclass
class LocalStep:
    """One step over its attempts: what a scheduler would keep of it.

    kill_after: how many progress reports an attempt gets to send before it is killed.
    """

    scratch: Path
    input: object
    inputs: Mapping[str, StoredArtifact] = field(default_factory=dict)
    effects: dict[str, str] = field(default_factory=dict)
    checkpoint: bytes | None = None
    attempt: int = 0
    progress: list[Progress] = field(default_factory=list)
    outputs: dict[str, StoredArtifact] = field(default_factory=dict)

    def run(self, handler: Callable[[BlockingJob], Any], *, kill_after: int | None = None) -> Any:
        self.attempt += 1
        self.outputs = {}
        port = _Port(self, kill_after)
        return handler(BlockingJob(self._start(), port))

    def _start(self) -> StartJob:
        return StartJob(
            lease_token=100 + self.attempt,
            step_run_id="step-1",
            workflow_run_id="run-1",
            step_name="step",
            definition="local",
            attempt=self.attempt,
            idempotency_key="run-1/step",
            failures=self.attempt - 1,
            max_attempts=3,
            kind="local",
            kind_version="1",
            time_left_s=None,
            inputs=[stored.info for stored in self.inputs.values()],
            secrets={},
            effects=dict(self.effects),
            scratch=str(self.scratch / f"attempt-{self.attempt}"),
            max_payload_bytes=1 << 20,
            input=json.dumps(self.input).encode(),
            checkpoint=self.checkpoint,
        )


class _Port:
    def __init__(self, step: LocalStep, kill_after: int | None) -> None:
        self._step = step
        self._left = kill_after
        self._requests = 0

    def send(self, message: FromRunner) -> None:
        if not isinstance(message, Progress):
            return
        if self._left is not None:
            if self._left == 0:
                raise Killed
            self._left -= 1
        self._step.progress.append(message)
        self._step.checkpoint = message.checkpoint or self._step.checkpoint

    def request(self, message: Request) -> Reply:
        path = ""
        match message:
            case RecordEffect(name=name, result=result):
                self._step.effects.setdefault(name, result.decode())
            case OpenArtifact(name=name):
                path = str(self._step.inputs[name].path)
            case PutArtifact():
                self._step.outputs[message.name] = _stored(message)
        return Reply(message.lease_token, message.request, path, "", "")

    def post(self, message: FromRunner) -> None:
        assert isinstance(message, LogLine)

    def next_request(self) -> int:
        self._requests += 1
        return self._requests


def _stored(message: PutArtifact) -> StoredArtifact:
    path = Path(message.path)
    assert sha256_of(path) == (message.sha256, message.size_bytes)
    info = InputInfo(
        name=message.name,
        sha256=message.sha256,
        size_bytes=message.size_bytes,
        media_type=message.media_type,
        type=message.type,
        metadata=message.metadata,
    )
    return StoredArtifact(path, info)


def as_input(stored: StoredArtifact, name: str) -> StoredArtifact:
    """The artifact under the name that a binding gives it."""
    info = stored.info
    return StoredArtifact(
        stored.path,
        InputInfo(name, info.sha256, info.size_bytes, info.media_type, info.type, info.metadata),
    )
