"""Artifacts of a run: found by name, shown, saved, printed."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from rara.v1 import common_pb2
from rara_client import Client
from rara_client.blobs import Check, save
from rara_client.names import is_artifact_name

from rara_cli import words
from rara_cli.answers import facts, print_document, width
from rara_cli.ask import confirm
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.lookup import find_run
from rara_cli.session import Session
from rara_cli.tables import Column, render


@dataclass(frozen=True, slots=True)
class Found:
    """An artifact and where it stands; step_name and step_run_id are empty for the run's inputs."""

    workflow_run_id: str
    step_name: str
    step_run_id: str
    artifact: common_pb2.Artifact

    @property
    def label(self) -> str:
        return f"{self.step_name}/{self.artifact.name}" if self.step_name else self.artifact.name


async def artifacts_of(client: Client, run_id: str) -> list[Found]:
    """The run's input artifacts, then those of its steps. Inline bytes are left out."""
    run = (await client.get_run(run_id)).run
    found = [Found(run_id, "", "", artifact) for artifact in run.input_artifacts]
    async with aclosing(client.list_step_runs(run_id, page_size=1000)) as steps:
        async for step in steps:
            found.extend(
                Found(run_id, step.step_name, step.step_run_id, artifact)
                for artifact in step.manifest.artifacts
            )
    return found


async def find_artifact(client: Client, arguments: Sequence[str], *, latest: bool) -> Found:
    """The one artifact that `RUN NAME` means, its inline bytes included."""
    if len(arguments) != (1 if latest else 2):
        raise CommandError(
            Exit.USAGE, "USAGE", "give RUN and NAME, or --latest and NAME", "rara artifact list RUN"
        )
    run_id = await find_run(client, None if latest else arguments[0], latest=latest)
    name = arguments[-1]
    found = await artifacts_of(client, run_id)
    candidates = [item for item in found if name in (item.artifact.name, item.label)]
    if "/" in name:  # a label says more than a name that looks like one
        candidates = [item for item in candidates if item.label == name] or candidates
    advice = f"rara artifact list {run_id}"
    if not candidates:
        raise CommandError(
            Exit.NOT_FOUND, "ARTIFACT_NOT_FOUND", f"run {run_id} has no artifact {name!r}", advice
        )
    if len({item.artifact.digest.sha256 for item in candidates}) > 1:
        labels = ", ".join(item.label for item in candidates)
        raise CommandError(Exit.USAGE, "AMBIGUOUS_NAME", f"{name!r} may be {labels}", "name one of these")
    chosen = candidates[0]
    if not chosen.step_run_id:
        return chosen
    step = (await client.get_step_run(chosen.step_run_id)).step_run
    whole = next(item for item in step.manifest.artifacts if item.name == chosen.artifact.name)
    return Found(chosen.workflow_run_id, chosen.step_name, chosen.step_run_id, whole)


async def content(client: Client, artifact: common_pb2.Artifact) -> AsyncGenerator[bytes, None]:
    """The bytes, from the message itself where they are in it."""
    if artifact.inline or not artifact.digest.size_bytes:
        check = Check(artifact.digest)
        check.take(artifact.inline)
        check.finish()
        yield artifact.inline
        return
    async for data in client.download_blob(artifact.digest):
        yield data


async def save_artifact(session: Session, client: Client, found: Found, destination: Path | None) -> None:
    """Write to a file; asks before it replaces one."""
    artifact = found.artifact
    if destination is None:
        destination = Path(_file_name(artifact.name))
    elif destination.is_dir():
        destination = destination / _file_name(artifact.name)
    if destination.exists():
        confirm(session, f"replace {destination}")
    await save(content(client, artifact), destination)
    match session.output:
        case "json" | "jsonl":
            print(dumps({**_view(found), "path": str(destination)}))
        case "name":
            print(destination)
        case _:
            for line in facts(
                [
                    ("file", str(destination)),
                    ("size", words.size_text(artifact.digest.size_bytes)),
                    ("sha256", artifact.digest.sha256),
                ]
            ):
                print(line)


def _file_name(name: str) -> str:
    """The last part of an artifact's name. What the other side calls it is not trusted to stay in a folder."""
    last = name.rpartition("/")[2]
    if is_artifact_name(last):
        return last
    raise CommandError(Exit.USAGE, "USAGE", f"{name!a} is no plain file name", "the same with --to FILE")


async def print_artifact(client: Client, found: Found) -> None:
    """To stdout as it comes; a mismatch shows at the end, as the exit code and a line on stderr."""
    sys.stdout.flush()
    async with aclosing(content(client, found.artifact)) as chunks:
        async for data in chunks:
            # In a thread: a pager that waits must not stop the connection's replies.
            await asyncio.to_thread(sys.stdout.buffer.write, data)
    sys.stdout.buffer.flush()


def show_artifacts(session: Session, found: Sequence[Found]) -> None:
    columns: list[Column[Found]] = [
        Column("NAME", lambda item: item.artifact.name),
        Column("STEP", lambda item: item.step_name or "(input)"),
        Column("TYPE", lambda item: item.artifact.type),
        Column("SIZE", lambda item: words.size_text(item.artifact.digest.size_bytes), is_number=True),
        Column("MEDIA TYPE", lambda item: item.artifact.media_type),
        Column(
            "SHA256", lambda item: item.artifact.digest.sha256[: None if session.output == "wide" else 12]
        ),
    ]
    match session.output:
        case "json":
            print_document([_view(item) for item in found])
        case "jsonl":
            for item in found:
                print(dumps(_view(item)))
        case "name":
            for item in found:
                print(item.label)
        case _ if not found:
            session.note("no artifacts; what the run is doing: rara run get RUN")
        case _:
            for line in render(found, columns, width=width(session), in_color=session.in_color):
                print(line)


def _view(found: Found) -> Json:
    return {
        "workflow_run_id": found.workflow_run_id,
        "step_name": found.step_name,
        "step_run_id": found.step_run_id,
        **to_json(found.artifact),
    }
