"""The artifacts of a job as its handler sees them: named inputs, and the outputs so far."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rara_executor import artifact_rules
from rara_executor.artifact_files import (
    Derivation,
    InputArtifact,
    OutputArtifact,
    OutputFile,
    check_metadata,
    keep_bytes,
    keep_file,
)
from rara_executor.codes import Code
from rara_executor.errors import JobFailure
from rara_executor.ports import AsyncPort, BlockingPort, check
from rara_executor.runner_protocol import InputInfo, OpenArtifact, PutArtifact, StartJob

MAX_CHECKPOINT_ARTIFACTS = 64

Keepable: TypeAlias = bytes | str | Path | InputArtifact  # a string is a path


class ArtifactsView:
    """The artifacts of one job: named inputs, and the outputs so far."""

    def __init__(self, start: StartJob) -> None:
        self._start = start
        self._opened: dict[str, InputArtifact] = {}
        self._put: dict[str, OutputArtifact] = {}
        self._files = 0

    def names(self) -> list[str]:
        """The names of the input artifacts."""
        return sorted(info.name for info in self._start.inputs)

    def checkpoint_names(self) -> list[str]:
        """The names of the artifacts that came with the checkpoint."""
        return sorted(info.name for info in self._start.checkpoint_artifacts)

    def _input(self, name: str) -> InputArtifact:
        return _named(self._start.inputs, name, "input")

    def _of_checkpoint(self, name: str) -> InputArtifact:
        return _named(self._start.checkpoint_artifacts, name, "checkpoint")

    def _carried(self, source: Keepable) -> str | None:
        """The digest of what the checkpoint before named, and is stored already; None for all else."""
        if not isinstance(source, InputArtifact):
            return None
        known = {info.sha256 for info in self._start.checkpoint_artifacts}
        return source.digest if source.digest in known else None

    def _keep_message(self, name: str, file: OutputFile, request: int) -> PutArtifact:
        message = self._message(
            file, name, request, "application/octet-stream", "checkpoint", None, derived_from=()
        )
        return replace(message, for_checkpoint=True)

    def _target(self, name: str, type_: str, media_type: str) -> Path:
        artifact_rules.check(name, type_, media_type)
        if name in self._put:
            raise artifact_rules.ArtifactInvalid(f"artifact name {name} was used before")
        if len(self._put) >= artifact_rules.MAX_ARTIFACTS:
            raise JobFailure(
                Code.ARTIFACT_TOO_LARGE, f"a manifest has at most {artifact_rules.MAX_ARTIFACTS} artifacts"
            )
        self._put[name] = OutputArtifact(name, "", 0)  # taken, also while another put is under way
        return self._new_file()

    def _new_file(self) -> Path:
        scratch = Path(self._start.scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        self._files += 1
        return scratch / f"out-{self._files}"

    def _message(
        self,
        file: OutputFile,
        name: str,
        request: int,
        media_type: str,
        type_: str,
        metadata: object,
        derived_from: Sequence[Derivation],
    ) -> PutArtifact:
        return PutArtifact(
            lease_token=self._start.lease_token,
            request=request,
            name=name,
            path=str(file.path),
            sha256=file.sha256,
            size_bytes=file.size_bytes,
            media_type=media_type,
            type=type_,
            metadata=check_metadata(name, metadata),
            derived_from=[self._source(source) for source in derived_from],
        )

    def _source(self, source: Derivation) -> tuple[str, int]:
        if isinstance(source, str):
            source = self._input(source)
        return source.digest, source.size_bytes

    def _stored(self, name: str, message: PutArtifact) -> OutputArtifact:
        self._put[name] = OutputArtifact(name, message.sha256, message.size_bytes)
        return self._put[name]


def _named(known: Iterable[InputInfo], name: str, what: str) -> InputArtifact:
    for info in known:
        if info.name == name:
            return InputArtifact.unopened(info)
    names = ", ".join(sorted(info.name for info in known)) or "none"
    raise JobFailure(Code.ARTIFACT_MISSING, f"no {what} artifact {name!r}; there are: {names}")


def _checked(given: Mapping[str, Keepable]) -> Mapping[str, Keepable]:
    if len(given) > MAX_CHECKPOINT_ARTIFACTS:
        raise JobFailure(
            Code.PAYLOAD_TOO_LARGE,
            f"{len(given)} artifacts of a checkpoint, the limit is {MAX_CHECKPOINT_ARTIFACTS}",
            retryable=False,
        )
    for name in given:
        artifact_rules.check(name, "checkpoint", "application/octet-stream")
    return given


def _keep(source: Keepable, target: Path) -> OutputFile:
    match source:
        case bytes():
            return keep_bytes(source, target)
        case InputArtifact():
            return keep_file(source.path, target)
        case _:
            return keep_file(Path(source), target)


class Artifacts(ArtifactsView):
    """Artifacts for an `async def` handler."""

    def __init__(self, start: StartJob, port: AsyncPort) -> None:
        super().__init__(start)
        self._port = port

    async def open(self, name: str) -> InputArtifact:
        """Fetch an input artifact, verified by digest and size."""
        if name not in self._opened:
            artifact = self._input(name)
            message = OpenArtifact(self._start.lease_token, self._port.next_request(), name)
            reply = await self._port.request(message)
            check(reply)
            self._opened[name] = artifact.at(Path(reply.path))
        return self._opened[name]

    async def open_checkpoint(self, name: str) -> InputArtifact:
        """Fetch an artifact that an earlier attempt kept with the checkpoint, verified by digest and size."""
        artifact = self._of_checkpoint(name)
        request = self._port.next_request()
        reply = check(
            await self._port.request(OpenArtifact(self._start.lease_token, request, name, of_checkpoint=True))
        )
        return artifact.at(Path(reply.path))

    async def keep_for_checkpoint(self, given: Mapping[str, Keepable]) -> list[tuple[str, str]]:
        """For Job.progress: store what a checkpoint is to name; names and where each is kept."""
        kept = []
        for name, source in _checked(given).items():
            if carried := self._carried(source):
                kept.append((name, carried))
                continue
            file = await asyncio.to_thread(_keep, source, self._new_file())
            check(await self._port.request(self._keep_message(name, file, self._port.next_request())))
            kept.append((name, str(file.path)))
        return kept

    async def put_file(
        self,
        name: str,
        path: str | Path,
        type: str = "blob",  # noqa: A002 - the contract's name
        media_type: str = "application/octet-stream",
        metadata: object = None,
        derived_from: Sequence[Derivation] = (),
    ) -> OutputArtifact:
        """Store a copy of the file as an output. derived_from: which inputs it was made from; empty: all."""
        target = self._target(name, type, media_type)
        return await self._keep(
            name, lambda: keep_file(Path(path), target), media_type, type, metadata, derived_from
        )

    async def put_bytes(
        self,
        name: str,
        data: bytes,
        type: str = "blob",  # noqa: A002 - the contract's name
        media_type: str = "application/octet-stream",
        metadata: object = None,
        derived_from: Sequence[Derivation] = (),
    ) -> OutputArtifact:
        """Store bytes as an output."""
        target = self._target(name, type, media_type)
        return await self._keep(
            name, lambda: keep_bytes(data, target), media_type, type, metadata, derived_from
        )

    async def _keep(
        self,
        name: str,
        keep: Callable[[], OutputFile],
        media_type: str,
        type_: str,
        metadata: object,
        derived_from: Sequence[Derivation],
    ) -> OutputArtifact:
        try:
            check_metadata(name, metadata)
            file = await asyncio.to_thread(keep)
            request = self._port.next_request()
            message = self._message(file, name, request, media_type, type_, metadata, derived_from)
            check(await self._port.request(message))
        except BaseException:
            del self._put[name]  # it was not stored: the name is free again
            raise
        return self._stored(name, message)


class BlockingArtifacts(ArtifactsView):
    """Artifacts for a plain `def` handler."""

    def __init__(self, start: StartJob, port: BlockingPort) -> None:
        super().__init__(start)
        self._port = port

    def open(self, name: str) -> InputArtifact:
        """Fetch an input artifact, verified by digest and size."""
        if name not in self._opened:
            artifact = self._input(name)
            reply = self._port.request(OpenArtifact(self._start.lease_token, self._port.next_request(), name))
            check(reply)
            self._opened[name] = artifact.at(Path(reply.path))
        return self._opened[name]

    def open_checkpoint(self, name: str) -> InputArtifact:
        """Fetch an artifact that an earlier attempt kept with the checkpoint, verified by digest and size."""
        artifact = self._of_checkpoint(name)
        request = self._port.next_request()
        reply = check(
            self._port.request(OpenArtifact(self._start.lease_token, request, name, of_checkpoint=True))
        )
        return artifact.at(Path(reply.path))

    def keep_for_checkpoint(self, given: Mapping[str, Keepable]) -> list[tuple[str, str]]:
        """For BlockingJob.progress: store what a checkpoint is to name; names and where each is kept."""
        kept = []
        for name, source in _checked(given).items():
            if carried := self._carried(source):
                kept.append((name, carried))
                continue
            file = _keep(source, self._new_file())
            check(self._port.request(self._keep_message(name, file, self._port.next_request())))
            kept.append((name, str(file.path)))
        return kept

    def put_file(
        self,
        name: str,
        path: str | Path,
        type: str = "blob",  # noqa: A002 - the contract's name
        media_type: str = "application/octet-stream",
        metadata: object = None,
        derived_from: Sequence[Derivation] = (),
    ) -> OutputArtifact:
        """Store a copy of the file as an output. derived_from: which inputs it was made from; empty: all."""
        target = self._target(name, type, media_type)
        return self._keep(
            name, lambda: keep_file(Path(path), target), media_type, type, metadata, derived_from
        )

    def put_bytes(
        self,
        name: str,
        data: bytes,
        type: str = "blob",  # noqa: A002 - the contract's name
        media_type: str = "application/octet-stream",
        metadata: object = None,
        derived_from: Sequence[Derivation] = (),
    ) -> OutputArtifact:
        """Store bytes as an output."""
        target = self._target(name, type, media_type)
        return self._keep(name, lambda: keep_bytes(data, target), media_type, type, metadata, derived_from)

    def _keep(
        self,
        name: str,
        keep: Callable[[], OutputFile],
        media_type: str,
        type_: str,
        metadata: object,
        derived_from: Sequence[Derivation],
    ) -> OutputArtifact:
        try:
            check_metadata(name, metadata)
            file = keep()
            request = self._port.next_request()
            message = self._message(file, name, request, media_type, type_, metadata, derived_from)
            check(self._port.request(message))
        except BaseException:
            del self._put[name]  # it was not stored: the name is free again
            raise
        return self._stored(name, message)
