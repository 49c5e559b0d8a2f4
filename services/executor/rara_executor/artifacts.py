"""The artifacts of one job: inputs made ready to read, outputs stored and listed for the manifest."""

import asyncio
import hashlib
from pathlib import Path

from rara.v1 import common_pb2, job_pb2

from rara_executor.blob_cache import BlobCache
from rara_executor.blob_client import BlobClient
from rara_executor.artifact_rules import MAX_MANIFEST_BYTES
from rara_executor.codes import Code
from rara_executor.errors import JobFailure
from rara_executor.runner_protocol import PutArtifact

MAX_INLINE_BYTES = 16 << 10
# All inline bytes of one manifest: the rest of a message may have 1 MiB.
MAX_INLINE_TOTAL_BYTES = 512 << 10


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
        self._scratch = scratch
        self._files: dict[str, tuple[common_pb2.Digest, str, Path]] = {}
        self._inline_total = 0

    async def open(self, name: str) -> Path:
        """A path with the verified bytes of the input artifact. Raises JobFailure."""
        artifact = self._inputs.get(name)
        if artifact is None:
            raise JobFailure(Code.ARTIFACT_MISSING, f"no input artifact {name!r}")
        target = self._scratch / f"in-{list(self._inputs).index(name)}"
        if name not in self.consumed:
            target.unlink(missing_ok=True)  # of an open that was cut short
            if artifact.inline or not artifact.digest.size_bytes:
                await asyncio.to_thread(_write_inline, artifact, target)
            else:
                async with self._store.transfers:
                    await self._store.cache.place(artifact.digest, target)
            self.consumed[name] = artifact.digest
        return target

    async def put(self, message: PutArtifact) -> None:
        self._manifest_bytes = 0
        """Store an output and list it. Raises JobFailure."""
        path = Path(message.path)
        if not path.is_relative_to(self._scratch):
            raise JobFailure(Code.INTERNAL, "an output outside the job's folder")
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
        self._files[message.sha256] = digest, message.media_type, path
        fits = message.size_bytes <= self._store.max_inline_bytes
        if fits and self._inline_total + message.size_bytes <= MAX_INLINE_TOTAL_BYTES:
            self._inline_total += message.size_bytes
            artifact.inline = await asyncio.to_thread(path.read_bytes)
        else:
            await self._upload(message.sha256)
        self.manifest.append(artifact)

    async def upload_again(self, digests: list[common_pb2.Digest]) -> None:
        """Store blobs that the scheduler misses. Raises JobFailure."""
        for digest in digests:
            if digest.sha256 not in self._files:
                raise JobFailure(
                    Code.ARTIFACT_MISMATCH,
                    f"blob {digest.sha256} is missing and is none of this job's outputs",
                )
            await self._upload(digest.sha256)

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
        self._manifest_bytes += artifact.ByteSize()
        if self._manifest_bytes > MAX_MANIFEST_BYTES:
            raise JobFailure(
                Code.ARTIFACT_TOO_LARGE,
                f"the manifest has {self._manifest_bytes} bytes, and {MAX_MANIFEST_BYTES} are its limit: "
                "use fewer artifacts, or less metadata",
            )
