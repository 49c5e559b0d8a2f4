"""A compose project through the `docker` command: its containers, what is done to them, and which of them end."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_TIMEOUT_S = 120.0
_BUILD_S = 1800.0  # a first build downloads bases and packages
_LABEL: Final = "com.docker.compose"
_REPORT_CHARACTERS = 3000
_LOG_LINES = "30"
_LOOK_S = 0.5
_AFTER_S = 3.0  # an engine tells of an end a little later
_UNITS: Final = {"B": 1, "kB": 1000, "KiB": 1 << 10, "MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}

_SIZE: Final = re.compile(rf"([0-9.]+)({'|'.join(_UNITS)})")


class DockerError(OSError):
    """A command that ended with another code than 0. said: what it printed."""

    def __init__(self, arguments: Sequence[str], code: int | None, said: str) -> None:
        super().__init__(f"docker {' '.join(arguments)}: exit {code}\n{said[-_REPORT_CHARACTERS:]}")
        self.code = code
        self.said = said


def why_not() -> str:
    """Why no container engine can be used; empty: one can."""
    if shutil.which("docker") is None:
        return "there is no docker on the PATH"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(command)}` failed: {done.stderr.strip()[-300:]}"
    return ""


async def docker(*arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S) -> str:
    """Its standard output. Raises DockerError where it fails, TimeoutError where it takes too long."""
    process = await asyncio.create_subprocess_exec(
        "docker",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if arguments[0] == "logs" else asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise DockerError(arguments, process.returncode, (out + (err or b"")).decode(errors="replace"))
    return out.decode(errors="replace")


@dataclass(slots=True, eq=False)
class Node:
    """One container that faults are about. networks: full names, those it belongs to."""

    id: str
    service: str
    number: int
    networks: Sequence[str]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one fault of it at a time
    kills: list[float] = field(default_factory=list)  # wall time
    ended_at: float = 0.0  # monotonic, of the last fault
    has_clock: bool = False  # one that can jump

    @property
    def name(self) -> str:
        return f"{self.service}-{self.number}"

    @property
    def host(self) -> str:
        """What the container calls itself, and an executor in it too."""
        return self.id[:12]

    @property
    def is_under_fault(self) -> bool:
        return self.turn.locked() or time.monotonic() - self.ended_at < _AFTER_S

    async def exec(self, *command: str, user: str | None = None) -> str:
        return await docker("exec", *(("-u", user) if user else ()), self.id, *command)

    async def kill(self) -> None:
        """SIGKILL, and it stays down."""
        self.kills.append(time.time())
        await docker("kill", self.id)

    async def stop(self) -> None:
        """SIGTERM, and it stays down; SIGKILL after its grace."""
        await docker("stop", self.id)

    async def start(self) -> None:
        await docker("start", self.id)

    async def connect(self, network: str) -> None:
        await docker("network", "connect", "--alias", self.service, network, self.id)


class Project:
    """name: as `docker compose -p`. env: what the files ask for."""

    def __init__(self, name: str, files: Sequence[Path], env: Mapping[str, str]) -> None:
        self.name = name
        self._files = [argument for file in files for argument in ("-f", str(file))]
        self._env = env

    async def compose(self, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
        return await docker(
            "compose", "-p", self.name, *self._files, *arguments, env=self._env, timeout_s=timeout_s
        )

    async def services(self) -> list[str]:
        return (await self.compose("config", "--services")).split()

    async def up(self, *scales: str) -> None:
        """Built and started, whatever waits for others included."""
        await self.compose("build", timeout_s=_BUILD_S)
        scale = [argument for each in scales for argument in ("--scale", each)]
        await self.compose("up", "-d", *scale, timeout_s=_BUILD_S)

    async def down(self) -> None:
        await self.compose(
            "--profile", "*", "down", "-v", "--remove-orphans", "--timeout", "1", timeout_s=_BUILD_S
        )

    async def nodes(self, service: str) -> list[Node]:
        """Its containers, by number."""
        shown = await self._inspect(service)
        return sorted((_node(one) for one in shown), key=lambda node: node.number)

    async def states(self, nodes: Sequence[Node]) -> dict[str, dict[str, Any]]:
        """What `docker inspect` says of each, by id."""
        return {one["Id"]: one for one in json.loads(await docker("inspect", *(node.id for node in nodes)))}

    async def until_healthy(self, nodes: Sequence[Node], bound_s: float) -> None:
        """Each has been so once: on a machine that is busy, not all are at the same moment. Else TimeoutError."""
        awaited = list(nodes)
        async with asyncio.timeout(bound_s):
            while awaited:
                states = await self.states(awaited)
                awaited = [node for node in awaited if not _is_healthy(states[node.id]["State"])]
                await asyncio.sleep(_LOOK_S)

    async def _inspect(self, service: str) -> list[dict[str, Any]]:
        found = await docker(
            *("ps", "-aq", "--filter", f"label={_LABEL}.project={self.name}"),
            *("--filter", f"label={_LABEL}.service={service}", "--filter", f"label={_LABEL}.oneoff=False"),
        )
        ids = found.split()
        shown: list[dict[str, Any]] = json.loads(await docker("inspect", *ids)) if ids else []
        return shown

    async def memory(self, nodes: Sequence[Node]) -> dict[str, int]:
        """Of those that run, by name; without what the kernel keeps of files."""
        shown = await docker("stats", "--no-stream", "--format", "{{json .}}", *(node.id for node in nodes))
        names = {node.host: node.name for node in nodes}
        found = {}
        for line in shown.splitlines():
            one = json.loads(line)
            if (name := names.get(one["ID"][:12])) and (size := in_bytes(one["MemUsage"].split("/")[0])):
                found[name] = size
        return found


def _is_healthy(state: Mapping[str, Any]) -> bool:
    return bool(state["Running"]) and state.get("Health", {}).get("Status", "healthy") == "healthy"


def _node(shown: Mapping[str, Any]) -> Node:
    labels = shown["Config"]["Labels"]
    networks = [name for name in shown["NetworkSettings"]["Networks"] if name != "none"]
    return Node(shown["Id"], labels[f"{_LABEL}.service"], int(labels[f"{_LABEL}.container-number"]), networks)


def in_bytes(text: str) -> int:
    """As `docker stats` writes sizes, 12.5MiB; 0 where it is none."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class Ends:
    """Notes every container of the nodes that ends while nothing is done to it."""

    def __init__(self, project: Project, nodes: Sequence[Node]) -> None:
        self.unasked: list[str] = []
        self._project = project
        self._nodes = {node.id: node for node in nodes}

    async def watch(self) -> None:
        """Until cancelled."""
        process = await asyncio.create_subprocess_exec(
            *("docker", "events", "--filter", f"label={_LABEL}.project={self._project.name}"),
            *("--filter", "type=container", "--filter", "event=die", "--format", "{{json .}}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdout is None:
            raise AssertionError("no standard output")
        try:
            while line := await process.stdout.readline():
                await self._note(json.loads(line))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _note(self, event: Mapping[str, Any]) -> None:
        node = self._nodes.get(event["Actor"]["ID"])
        if node is None or node.is_under_fault:
            return
        code = event["Actor"]["Attributes"].get("exitCode")
        said = await docker("logs", "--tail", _LOG_LINES, node.id)
        self.unasked.append(f"{node.name} ended with {code}: {said[-_REPORT_CHARACTERS:]}")
