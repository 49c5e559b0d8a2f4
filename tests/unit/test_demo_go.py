"""What the demo says when there is no Go executor to be had, and that it never waits for long."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from rara_cli.demogo import NotBuilt, build_go_executor


def fake_go(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The only `go` on the PATH is this script."""
    go = folder / "bin" / "go"
    go.parent.mkdir()
    go.write_text(f"#!/bin/sh\n{script}\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(go.parent))


async def why_not(folder: Path, *, sources: bool = True, within_s: float = 20.0) -> str:
    module = folder / "sources"
    module.mkdir()
    if sources:
        (module / "go.mod").write_text("module example\n")
    with pytest.raises(NotBuilt) as caught:
        await build_go_executor(folder / "home" / "program", sources=module, within_s=within_s)
    return str(caught.value)


async def test_no_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await why_not(tmp_path) == "there is no `go` on the PATH"


async def test_an_installation_without_the_sources_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_go(tmp_path, monkeypatch, "exit 0")
    assert await why_not(tmp_path, sources=False) == "this installation comes without the Go sources"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("go: downloading a v1\ngo: a@v1: no such host\nb.go:1:2: more", "go: a@v1: no such host"),
        ("# example/b\nb/b.go:1:2: undefined: c", "b/b.go:1:2: undefined: c"),
        ("x" * 1000, "x" * 200),
        ("", "it does not say why"),
    ],
)
async def test_a_build_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, reason: str
) -> None:
    fake_go(tmp_path, monkeypatch, f"printf '%s' '{output}' >&2; exit 1")
    assert await why_not(tmp_path) == f"`go build` failed: {reason}"


async def test_a_program_of_that_name_that_does_not_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_go(tmp_path, monkeypatch, "")
    (tmp_path / "bin" / "go").write_bytes(b"\x7fELF of another machine")
    assert await why_not(tmp_path) == "`go` does not start: Exec format error"


async def test_a_build_that_hangs_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = tmp_path / "child"
    fake_go(tmp_path, monkeypatch, f"/bin/sleep 60 & echo $! > {children}; wait")
    began = time.monotonic()
    assert await why_not(tmp_path, within_s=1.0) == (
        "`go build` took more than 1 s; the next one goes on from there"
    )
    assert time.monotonic() - began < 15
    child = int(children.read_text())
    async with asyncio.timeout(10):
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def test_the_build_is_this_checkouts_and_by_the_go_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    fake_go(tmp_path, monkeypatch, f'echo "$PWD $GOTOOLCHAIN $*" > {said}')
    target = tmp_path / "new" / "program"
    assert await build_go_executor(target) == target
    root = Path(__file__).resolve().parents[2]
    assert said.read_text() == (
        f"{root}/executors/go local build -buildvcs=false -o {target} ./cmd/rara-go-executor\n"
    )
