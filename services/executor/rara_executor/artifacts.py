"""The artifacts of one job: inputs made ready to read, outputs stored and listed for the manifest."""

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from rara.v1 import common_pb2, job_pb2

from rara_executor.artifact_rules import MAX_MANIFEST_BYTES
from rara_executor.blob_cache import BlobCache
from rara_executor.blob_client import BlobClient
from rara_executor.codes import Code
from rara_executor.errors import JobFailure
from rara_executor.runner_protocol import PutArtifact

MAX_INLINE_BYTES = 16 << 10
# All inline bytes of one manifest: the rest of a message may have 1 MiB.
MAX_INLINE_TOTAL_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of a checkpoint. path: None until they are opened."""

    digest: common_pb2.Digest
    media_type: str
    path: Path | None


class ArtifactStore:
    """What all jobs share: the service, the cache and a bound on transfers at once."""

    def __init__(self, client: BlobClient, cache: BlobCache, *, transfers: int) -> None:
        self.client = client
        self.cache = cache
        self.max_inline_bytes = MAX_INLINE_BYTES
        self.transfers = asyncio.Semaphore(transfers)


class JobArtifacts:
    """Kept until the job's last event is acknowledged, so that a missing blob can be stored again."""

    def __init__(self, store: ArtifactStore, request: job_pb2.JobRequest, scratch: Path) -> None:
        self.manifest: list[common_pb2.Artifact] = []
        self.consumed: dict[str, common_pb2.Digest] = {}
        self._store = store
        self._lease = request.lease
        self._inputs = {artifact.name: artifact for artifact in request.input_artifacts}
        self._carried = {artifact.name: artifact for artifact in request.checkpoint_artifacts}
        self._opened: dict[tuple[bool, str], Path] = {}
        self._kept: dict[str, _Kept] = {
            artifact.digest.sha256: _Kept(artifact.digest, artifact.media_type, None)
            for artifact in request.checkpoint_artifacts
        }
        self._named: dict[int, set[str]] = {}  # what checkpoints name of it, by the number of their event
        self._unstored: set[int] = set()  # of those events
        self._scratch = scratch
        self._files: dict[str, tuple[common_pb2.Digest, str, Path]] = {}
        self._inline_total = 0
        self._manifest_bytes = 0

    async def open(self, name: str, *, of_checkpoint: bool = False) -> Path:
        """A path with the verified bytes of an input, or of the checkpoint's artifact. Raises JobFailure."""
        known, what = (self._carried, "checkpoint") if of_checkpoint else (self._inputs, "input")
        artifact = known.get(name)
        if artifact is None:
            raise JobFailure(Code.ARTIFACT_MISSING, f"no {what} artifact {name!r}")
        target = self._scratch / f"{'checkpoint' if of_checkpoint else 'in'}-{list(known).index(name)}"
        if (of_checkpoint, name) not in self._opened:
            target.unlink(missing_ok=True)  # of an open that was cut short
            if artifact.inline or not artifact.digest.size_bytes:
                await asyncio.to_thread(_write_inline, artifact, target)
            else:
                async with self._store.transfers:
                    await self._store.cache.place(artifact.digest, target)
            self._opened[of_checkpoint, name] = target
            if of_checkpoint:
                self._kept[artifact.digest.sha256] = _Kept(artifact.digest, artifact.media_type, target)
            else:
                self.consumed[name] = artifact.digest
        return target

    async def keep(self, message: PutArtifact) -> None:
        """Store bytes that a checkpoint is going to name by their path. Raises JobFailure."""
        path = self._own(message.path)
        digest = common_pb2.Digest(sha256=message.sha256, size_bytes=message.size_bytes)
        self._kept[message.path] = kept = _Kept(digest, message.media_type, path)
        await self._upload_kept(kept)

    def of_checkpoint(self, named: list[tuple[str, str]]) -> list[common_pb2.Artifact]:
        """What a checkpoint names: by the path of what was kept, or by a digest of the checkpoint before."""
        artifacts = []
        for name, key in named:
            kept = self._kept[key]
            artifacts.append(
                common_pb2.Artifact(
                    name=name, digest=kept.digest, media_type=kept.media_type, type="checkpoint"
                )
            )
        return artifacts

    def checkpoint_queued(self, sequence: int, named: list[tuple[str, str]]) -> None:
        """The event of this number names these; what it named before, unsent, was merged into it."""
        replaced = self._named.pop(sequence, set())
        self._named[sequence] = {key for _, key in named}
        self._unstored.add(sequence)
        self._remove_unneeded(replaced)

    def checkpoint_stored(self, sequence: int) -> None:
        """The event of this number will not be refused any more: nobody asks for its bytes again."""
        if sequence in self._unstored:
            self._unstored.remove(sequence)
            self._remove_unneeded(set())

    def _remove_unneeded(self, keys: set[str]) -> None:
        """Remove files that neither the newest two checkpoints name nor any that is not known to be stored."""
        for sequence in list(self._named)[:-2]:
            if sequence not in self._unstored:
                keys |= self._named.pop(sequence)
        for key in keys - set().union(*self._named.values()):
            path = self._kept[key].path
            if path is not None and path == Path(key):
                path.unlink(missing_ok=True)
                del self._kept[key]

    def _own(self, path: str) -> Path:
        if not Path(path).is_relative_to(self._scratch):
            raise JobFailure(Code.INTERNAL, "an artifact outside the job's folder")
        return Path(path)

    async def put(self, message: PutArtifact) -> None:
        """Store an output and list it. Raises JobFailure."""
        path = self._own(message.path)
        digest = common_pb2.Digest(sha256=message.sha256, size_bytes=message.size_bytes)
        artifact = common_pb2.Artifact(
            name=message.name,
            digest=digest,
            media_type=message.media_type,
            type=message.type,
            derived_from=[
                common_pb2.Digest(sha256=sha256, size_bytes=size) for sha256, size in message.derived_from
            ],
        )
        if message.metadata:
            artifact.metadata.data = message.metadata.encode()
        size_bytes = artifact.ByteSize()
        self._manifest_bytes += size_bytes
        try:
            await self._store_output(artifact, path)
        except BaseException:
            self._manifest_bytes -= size_bytes
            if path in (file for _, _, file in self._files.values()):
                del self._files[message.sha256]
            path.unlink(missing_ok=True)
            raise
        self.manifest.append(artifact)

    async def _store_output(self, artifact: common_pb2.Artifact, path: Path) -> None:
        if self._manifest_bytes > MAX_MANIFEST_BYTES:
            raise JobFailure(
                Code.ARTIFACT_TOO_LARGE,
                f"the manifest has {self._manifest_bytes} bytes, and {MAX_MANIFEST_BYTES} are its limit: "
                "use fewer artifacts, or less metadata",
            )
        digest = artifact.digest
        if digest.sha256 in self._files:  # the same bytes again: one copy of them is enough
            await asyncio.to_thread(path.unlink)
        else:
            self._files[digest.sha256] = digest, artifact.media_type, path
        fits = digest.size_bytes <= self._store.max_inline_bytes
        if fits and self._inline_total + digest.size_bytes <= MAX_INLINE_TOTAL_BYTES:
            self._inline_total += digest.size_bytes
            artifact.inline = await asyncio.to_thread(self._files[digest.sha256][2].read_bytes)
        else:
            await self._upload(digest.sha256)

    async def upload_again(self, digests: list[common_pb2.Digest]) -> None:
        """Store blobs that the scheduler misses. Raises JobFailure."""
        for digest in digests:
            if digest.sha256 in self._files:
                await self._upload(digest.sha256)
                continue
            found = [
                kept for kept in self._kept.values() if kept.digest.sha256 == digest.sha256 and kept.path
            ]
            if not found:
                raise JobFailure(
                    Code.ARTIFACT_MISMATCH,
                    f"blob {digest.sha256} is missing, and this job does not have its bytes",
                )
            await self._upload_kept(found[0])

    async def _upload_kept(self, kept: "_Kept") -> None:
        if kept.digest.size_bytes and kept.path:  # the empty blob is known by its digest
            async with self._store.transfers:
                await self._store.client.upload(self._lease, kept.digest, kept.media_type, kept.path)

    async def _upload(self, sha256: str) -> None:
        digest, media_type, path = self._files[sha256]
        async with self._store.transfers:
            await self._store.client.upload(self._lease, digest, media_type, path)


def _write_inline(artifact: common_pb2.Artifact, target: Path) -> None:
    sha256 = hashlib.sha256(artifact.inline).hexdigest()
    if (sha256, len(artifact.inline)) != (artifact.digest.sha256, artifact.digest.size_bytes):
        raise JobFailure(
            Code.ARTIFACT_MISMATCH, f"input artifact {artifact.name!r} does not have the digest that it names"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(artifact.inline)
