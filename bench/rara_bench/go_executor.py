"""The Go executor of the probe operations, built once a run."""

import asyncio
import shutil
from pathlib import Path
from typing import Final

from rara_bench.arm import Bench, CannotMeasure

_SOURCE: Final = Path(__file__).resolve().parents[2] / "executors" / "go"
_KEY: Final = "go executor"


async def program(bench: Bench) -> Path:
    """Raises CannotMeasure without Go."""
    built = bench.kept.get(_KEY)
    if not isinstance(built, Path):
        built = await build(_SOURCE, "./cmd/rara-go-probe", bench.folder / "rara-go-probe")
        bench.kept[_KEY] = built
    return built


async def build(module: Path, package: str, target: Path) -> Path:
    go = shutil.which("go")
    if go is None:
        raise CannotMeasure("there is no `go` on the PATH")
    process = await asyncio.create_subprocess_exec(
        go,
        *("build", "-buildvcs=false", "-o", str(target), package),
        cwd=module,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode != 0:
        raise CannotMeasure(f"{package} does not build: {said.decode()[-1000:]}")
    return target
