"""The Go executor of the load, built from this repository where that can be done."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).resolve().parents[2] / "executors" / "go"
_NAME: Final = "rara-go-chaos"


def why_not() -> str:
    """Why no Go executor can be built here; empty: one can."""
    if shutil.which("go") is None:
        return "there is no go on the PATH"
    return "" if _SOURCE.is_dir() else f"there is no {_SOURCE}"


async def build(folder: Path, *, static: bool = False) -> Path:
    """The program, in the folder. Go's own cache makes a second build short.

    static: for Linux, to be run in a container that has nothing else.
    """
    program = folder / _NAME
    env = os.environ | ({"CGO_ENABLED": "0", "GOOS": "linux"} if static else {})
    process = await asyncio.create_subprocess_exec(
        "go", "build", "-o", str(program), f"./cmd/{_NAME}", cwd=_SOURCE, env=env
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if code != 0:
        raise RuntimeError(f"go build ended with {code}")
    return program
