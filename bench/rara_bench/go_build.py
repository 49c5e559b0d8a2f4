"""Programs in Go, each built once a run."""

import asyncio
import shutil
from pathlib import Path

from rara_bench.arm import Bench, CannotMeasure


async def program(bench: Bench, module: Path, package: str, name: str) -> Path:
    """Raises CannotMeasure without Go."""
    built = bench.kept.get(name)
    if not isinstance(built, Path):
        built = await _build(module, package, bench.folder / name)
        bench.kept[name] = built
    return built


async def _build(module: Path, package: str, target: Path) -> Path:
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
