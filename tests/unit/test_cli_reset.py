"""`rara dev reset` deletes what is ours and unused, and nothing else."""

import fcntl
from pathlib import Path

import pytest
from support.command_line import rara


def a_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("postgres", "blobs", "executor", "logs"):
        (folder / name).mkdir(parents=True)
    return folder


async def test_a_folder_of_ours_is_deleted_after_a_yes(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    asked = await rara("dev", "reset", "--dir", str(folder))
    assert (asked.code, folder.exists()) == (2, True)
    assert "CONFIRMATION_NEEDED" in asked.err
    done = await rara("dev", "reset", "--dir", str(folder), "--yes")
    assert (done.code, done.out, folder.exists()) == (0, "", False)


async def test_a_folder_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    result = await rara("dev", "reset", "--dir", str(tmp_path / "nothing"), "--yes")
    assert result.code == 0


@pytest.mark.parametrize("name", ["thesis.txt", ".git"])
async def test_a_folder_with_anything_else_in_it_stays(tmp_path: Path, name: str) -> None:
    folder = a_folder(tmp_path)
    (folder / name).mkdir()
    result = await rara("dev", "reset", "--dir", str(folder), "--yes")
    assert result.code == 5
    assert result.err == f"rara: NOT_OURS: {folder} holds what rara did not put there: {name}\n"
    assert (folder / "postgres").exists()


async def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    with (folder / "postgres" / "owner.lock").open("w") as lock:
        lock.write("process 42\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = await rara("dev", "reset", "--dir", str(folder), "--yes")
    assert result.code == 5
    assert result.err == f"rara: FOLDER_IN_USE: {folder} is in use by process 42 (next: stop it first)\n"
    assert folder.exists()
