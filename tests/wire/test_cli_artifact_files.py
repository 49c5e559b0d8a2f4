"""`rara artifact get` and `cat` against a scheduler that means no good: what is written is checked and in place."""

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rara.v1 import common_pb2, workflow_pb2
from support.command_line import rara
from support.scripted_workflow import ScriptedServer, scripted_server

RUN = "0198c2a0-0000-7000-8000-000000000000"
STEP = "0198c2a0-0000-7000-8000-000000000001"
DATA = b"these are the bytes"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path


def plant(server: ScriptedServer, name: str, *, inline: bytes = b"") -> str:
    """An artifact of this name; the id of its run."""
    step = workflow_pb2.StepRun(step_run_id=STEP, workflow_run_id=RUN, step_name="make")
    digest = common_pb2.Digest(sha256=hashlib.sha256(DATA).hexdigest(), size_bytes=len(DATA))
    step.manifest.artifacts.add(name=name, digest=digest, inline=inline)
    server.artifacts.blobs[digest.sha256] = DATA
    server.workflow.put_run(workflow_pb2.WorkflowRun(workflow_run_id=RUN, definition="nightly"))
    server.workflow.put_step(step)
    return RUN


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "file"),
    [("model", "model"), ("files/a/b.txt", "b.txt"), ("a" * 255, "a" * 255), ("x%2Fy", "x%2Fy")],
    ids=["plain", "path", "long", "encoded"],
)
async def test_the_file_is_called_as_the_last_part_of_the_name(
    server: ScriptedServer, folder: Path, name: str, file: str
) -> None:
    run_id = plant(server, name)
    result = await rara("artifact", "get", run_id, name, server=server.address)
    assert (result.code, result.err) == (0, "")
    assert (folder / "home" / file).read_bytes() == DATA
    assert files(folder) == {f"home/{file}"}


HOSTILE = [
    "..",
    "a/..",
    ".hidden",
    "a/.git",
    "a.",
    "a\nb",
    "\x1b[31mred",
    "a b",
    "C:\\x",
    "a\u202etxt.exe",
    "\u0430",
    "e\u0301",
    "~root",
    "a/",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("way", ["here", "folder"])
async def test_a_name_that_is_no_plain_file_writes_nothing(
    server: ScriptedServer, folder: Path, name: str, way: str
) -> None:
    run_id = plant(server, name)
    to = ["--to", str(folder / "home")] if way == "folder" else []
    result = await rara("artifact", "get", run_id, name, *to, server=server.address)
    assert result.code == 2
    assert result.err.isascii()
    assert result.err.rstrip("\n").isprintable()
    assert files(folder) == set()
    target = folder / "chosen"
    result = await rara("artifact", "get", run_id, name, "--to", str(target), server=server.address)
    assert (result.code, target.read_bytes()) == (0, DATA)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../b"])
async def test_only_the_last_part_of_a_path_counts(server: ScriptedServer, folder: Path, name: str) -> None:
    run_id = plant(server, name)
    await rara("artifact", "get", run_id, name, server=server.address)
    assert files(folder) == {f"home/{name.rpartition('/')[2]}"}


async def test_a_link_at_the_destination_is_replaced_and_not_followed(
    server: ScriptedServer, folder: Path
) -> None:
    victim = folder / "victim"
    victim.write_bytes(b"untouched")
    (folder / "home" / "model").symlink_to(victim)
    run_id = plant(server, "model")
    result = await rara("artifact", "get", run_id, "model", "--yes", server=server.address)
    assert result.code == 0
    assert victim.read_bytes() == b"untouched"
    assert (folder / "home" / "model").read_bytes() == DATA
    assert not (folder / "home" / "model").is_symlink()


@pytest.mark.parametrize("change", ["cut", "flipped", "longer", "inline"])
@pytest.mark.parametrize("command", ["get", "cat"])
async def test_wrong_bytes_are_refused(
    server: ScriptedServer, folder: Path, change: str, command: str
) -> None:
    run_id = plant(server, "model", inline=b"other" if change == "inline" else b"")
    wrong = {"cut": DATA[:-1], "flipped": b"T" + DATA[1:], "longer": DATA + b"!", "inline": DATA}[change]
    server.artifacts.blobs[hashlib.sha256(DATA).hexdigest()] = wrong
    result = await rara("artifact", command, run_id, "model", server=server.address)
    assert (result.code, result.err.partition(": ")[2].partition(":")[0]) == (5, "ARTIFACT_MISMATCH")
    assert files(folder) == set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
async def test_a_full_disk_is_named_and_leaves_nothing(
    server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = plant(server, "model")
    monkeypatch.setattr("rara_client.blobs._new_file_beside", lambda _: Full("/dev/full"))
    result = await rara("artifact", "get", run_id, "model", server=server.address)
    assert result.code == 2
    assert "FILE_UNUSABLE: model: No space left on device" in result.err
    assert files(folder) == set()


class Full(type(Path())):  # type: ignore[misc]  # the class that paths have here
    """`/dev/full` is needed again."""

    def unlink(self, missing_ok: bool = False) -> None:
        assert missing_ok


async def test_nobody_can_foresee_the_name_of_the_unfinished_file(
    server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    replace = Path.replace

    def noted(self: Path, target: Path) -> Path:
        seen.add(self.name)
        assert os.stat(self).st_nlink == 1  # noqa: PTH116
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    run_id = plant(server, "model")
    for number in range(2):
        await rara("artifact", "get", run_id, "model", "--to", f"{folder}/{number}", server=server.address)
    assert len(seen) == 2
    assert all(name.startswith(".rara-") for name in seen)
