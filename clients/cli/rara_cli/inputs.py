"""What a run is started with: its input, labels and files, as they stand on the command line."""

import json
import mimetypes
import sys
from collections.abc import Sequence
from pathlib import Path

from rara.v1 import common_pb2
from rara_client import Client
from rara_client.names import is_artifact_name
from rara_client.payloads import json_payload

from rara_cli.exits import CommandError, Exit


def read_input(values: Sequence[str]) -> common_pb2.Payload | None:
    """@FILE, @- or JSON text as they are, or KEY=VALUE pairs as an object; a VALUE that is JSON is that value.

    Text is passed on unread: the scheduler says what is wrong with it, and nothing changes on the way.
    """
    if not values:
        return None
    if all(_is_pair(value) for value in values):
        return json_payload(dict(_pair(value) for value in values))
    if len(values) > 1:
        raise CommandError(
            Exit.USAGE,
            "USAGE",
            "--input: one of @FILE, @-, JSON, or any number of KEY=VALUE",
            "rara run start --help",
        )
    text = values[0]
    if text == "@-":
        return common_pb2.Payload(data=sys.stdin.buffer.read())
    if text.startswith("@"):
        return common_pb2.Payload(data=Path(text[1:]).read_bytes())
    return common_pb2.Payload(data=text.encode("utf-8", "surrogateescape"))


def _is_pair(text: str) -> bool:
    key, equals, _ = text.partition("=")
    return bool(equals) and not text.startswith(("{", "[", '"', "@")) and bool(key.strip())


def _pair(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    try:
        parsed: object = json.loads(value, parse_constant=lambda _: value)
    except ValueError:
        parsed = value
    return key, parsed


def read_labels(values: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE pairs."""
    labels: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise CommandError(Exit.USAGE, "USAGE", f"--label {text!r}: write it KEY=VALUE")
        labels[key] = value
    return labels


def read_artifacts(values: Sequence[str]) -> dict[str, Path]:
    """NAME=PATH pairs of files that are there."""
    files: dict[str, Path] = {}
    for text in values:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise CommandError(Exit.USAGE, "USAGE", f"--artifact {text!r}: write it NAME=PATH")
        if not is_artifact_name(name):
            raise CommandError(
                Exit.USAGE,
                "USAGE",
                f"--artifact {name!a}: no name for an artifact",
                "letters, digits and _ % . - + @ , in parts joined by /",
            )
        if name in files:
            raise CommandError(Exit.USAGE, "USAGE", f"--artifact {name}: given twice")
        files[name] = Path(path)
        if not files[name].is_file():
            raise CommandError(Exit.USAGE, "FILE_UNUSABLE", f"{path}: there is no such file")
    return files


async def upload(client: Client, files: dict[str, Path]) -> list[common_pb2.Artifact]:
    """Store the files, and name them as a run's input artifacts."""
    artifacts = []
    for name, path in files.items():
        media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        digest = await client.upload_blob(path, media_type=media_type)
        artifacts.append(common_pb2.Artifact(name=name, digest=digest, media_type=media_type, type="blob"))
    return artifacts
