"""The shipped compose file as a project of a test's own: built, started, stopped, and gone when the test is over.

By Docker's own command: what stands in the documents is typed, and several projects run beside each other, for which
testcontainers has no name to give.
"""

import asyncio
import contextlib
import json
import os
import uuid
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "deploy" / "docker-compose.yml"
OPERATIONS = Path(__file__).with_name("container_operations.py")
# Another checkout may be at it on the same engine.
TAG = f"test-{zlib.crc32(str(COMPOSE_FILE).encode()):08x}"
TIMEOUT_S = 900.0  # a first build downloads bases and packages
HEALTHY_S = 120.0


@dataclass(frozen=True, slots=True)
class Container:
    """What `docker inspect` says of one container."""

    id: str
    service: str
    number: int
    is_running: bool
    health: str
    exit_code: int
    pid: int
    restarts: int
    started_at: datetime
    finished_at: datetime


class ComposeProject:
    """Images have a tag of this checkout's tests and ports are free, so that a system that is up stays as it is."""

    def __init__(self, folder: Path, overrides: Mapping[str, Any]) -> None:
        self.name = f"rara-test-{uuid.uuid4().hex[:8]}"
        self.work = folder / "work"
        """What the operations write down, and where they look for `go`."""
        self._override = folder / "override.yml"
        self._override.write_text(yaml.safe_dump(dict(overrides)))

    async def compose(self, *arguments: str) -> str:
        """What `docker compose` prints; AssertionError with its words where it fails."""
        files = ("-f", str(COMPOSE_FILE), "-f", str(self._override))
        return await docker("compose", "-p", self.name, *files, *arguments)

    async def up(self, *arguments: str) -> None:
        try:
            await self.compose("up", "-d", "--wait", *arguments)
        except AssertionError as failure:
            failure.add_note(await self.compose("logs", "--no-color", "--tail", "30"))
            raise

    async def address(self, number: int = 1) -> str:
        """Of a scheduler's published port."""
        return (await self.compose("port", "--index", str(number), "scheduler", "7310")).strip()

    async def containers(self, service: str) -> list[Container]:
        """Those of a service, stopped ones too, by number."""
        label = "com.docker.compose"
        found = await docker(
            *("ps", "-aq", "--filter", f"label={label}.project={self.name}"),
            *("--filter", f"label={label}.service={service}", "--filter", f"label={label}.oneoff=False"),
        )
        if not found.split():
            return []
        shown = json.loads(await docker("inspect", *found.split()))
        return sorted((_container(one, label) for one in shown), key=lambda one: one.number)

    async def until_healthy(self, service: str, count: int) -> None:
        """Wait until so many of its containers run and pass their check."""
        async with asyncio.timeout(HEALTHY_S):
            while True:
                found = await self.containers(service)
                if sum(one.is_running and one.health == "healthy" for one in found) == count == len(found):
                    return
                await asyncio.sleep(0.2)

    async def events(self, container: Container) -> list[dict[str, Any]]:
        """The lines of its log that are JSON, all starts together."""
        text = await docker("logs", container.id)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    async def down(self) -> None:
        await self.compose("--profile", "*", "down", "-v", "--remove-orphans", "--timeout", "1")


async def docker(*arguments: str) -> str:
    """Standard output of a command that must succeed; of `logs`, standard error, too."""
    return await _done(["docker", *arguments], is_log=arguments[0] == "logs")


async def typed(line: str, project: str, env: Mapping[str, str] | None = None) -> str:
    """What a line prints that is typed into a shell in this repository, for the compose project."""
    return await _done(["sh", "-c", line], {"COMPOSE_PROJECT_NAME": project, **(env or {})})


async def _done(command: Sequence[str], env: Mapping[str, str] | None = None, *, is_log: bool = False) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if is_log else asyncio.subprocess.PIPE,
        env={**os.environ, "RARA_TAG": TAG, "RARA_PORTS": "", **(env or {})},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = "\n".join(part.decode(errors="replace") for part in (out, err) if part)
        raise AssertionError(f"{' '.join(command)}: exit {process.returncode}\n{said[-6000:]}")
    return out.decode(errors="replace")


@contextlib.asynccontextmanager
async def project(
    folder: Path, scheduler_env: Mapping[str, str] | None = None
) -> AsyncIterator[ComposeProject]:
    """A project that is not started yet; its executors also offer the operations of this package."""
    overrides = _with_operations(folder)
    overrides["services"]["scheduler"] = {"environment": dict(scheduler_env or {})}
    made = ComposeProject(folder, overrides)
    try:
        yield made
    finally:
        await made.down()


def _with_operations(folder: Path) -> dict[str, Any]:
    """Mount the operations, and `work`, where they write down what they do."""
    work = folder / "work"
    work.mkdir()
    for shared in (folder, work):  # the containers' user is not ours
        shared.chmod(0o777)
    mounted = folder / OPERATIONS.name
    mounted.write_bytes(OPERATIONS.read_bytes())
    mounted.chmod(0o644)
    executor = {
        "environment": {
            "RARA_EXECUTOR_MODULES": f"knowledge_pipeline.operations,{OPERATIONS.stem}",
            "PYTHONPATH": "/tests",
        },
        "volumes": [f"{mounted}:/tests/{OPERATIONS.name}:ro", f"{work}:/tests/work"],
    }
    return {"services": {"python-executor": executor}}


def _container(shown: Mapping[str, Any], label: str) -> Container:
    state, labels = shown["State"], shown["Config"]["Labels"]
    return Container(
        id=shown["Id"],
        service=labels[f"{label}.service"],
        number=int(labels[f"{label}.container-number"]),
        is_running=state["Running"],
        health=state.get("Health", {}).get("Status", ""),
        exit_code=state["ExitCode"],
        pid=state["Pid"],
        restarts=shown["RestartCount"],
        started_at=datetime.fromisoformat(state["StartedAt"]),
        finished_at=datetime.fromisoformat(state["FinishedAt"]),
    )
