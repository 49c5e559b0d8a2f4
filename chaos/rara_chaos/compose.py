"""The stack of the compose file as a target: two of each service, under the faults that an engine can do to them."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import asyncpg
import orjson
from rara_cli.ports import lasting_port

from rara_chaos import clock, golang
from rara_chaos.composefaults import CLOCK_FILE, KINDS, READY_S, ComposeFaults, Nodes
from rara_chaos.docker import DockerError, Ends, Node, Project, docker
from rara_chaos.load import Confirmed
from rara_chaos.schedule import Kind
from rara_chaos.shapes import MIXED_SHAPES, SHAPES
from rara_chaos.target import Target
from rara_chaos.verdict import Verdict, judge

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILE: Final = _ROOT / "deploy" / "docker-compose.yml"
_OVERRIDES: Final = _ROOT / "chaos"
_COUNT = 2  # of schedulers, and of executors in each language
_LEDGER: Final = "/chaos/work/ledger.jsonl"
_BLOBS: Final = "file:///var/lib/rara/blobs"
_COLLECT_S = 15.0
_CHECK_S = 600.0
_PROMISE_BROKEN = 7
_DAY_S = 86_400
_KEPT_LINES = "20000"  # of each container


class Compose(Target):
    name = "compose"
    also = ()
    deals_all = False
    numbers = 500  # of what they make, some 200 MB, the small disk has room
    quiet_s = 180.0
    look_s = 10.0

    def __init__(
        self,
        project: Project,
        nodes: Nodes,
        folder: Path,
        database_url: str,
        addresses: Sequence[str],
        cpus: int,
        left_out: Mapping[Kind, str],
    ) -> None:
        self.left_out = left_out
        self.kinds = [kind for kind in KINDS if kind not in left_out]
        self.executor_kinds = sorted({node.service.removesuffix("-executor") for node in nodes.executors})
        self.shapes = MIXED_SHAPES if "go" in self.executor_kinds else SHAPES
        self.addresses = addresses
        self.ledger = _LEDGER
        self.database_url = database_url
        self.faults = self._faults = ComposeFaults(project, nodes, database_url, cpus)
        self._project = project
        self._nodes = nodes
        self._folder = folder
        self._ends = Ends(project, nodes.all)
        self._removed = 0

    async def beside(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ends.watch(), name="ends of containers")
            tasks.create_task(self._collect(), name="collections")

    async def _collect(self) -> None:
        """Garbage, with next to no patience, in whatever scheduler is there."""
        while True:
            for node in self._nodes.schedulers:
                await asyncio.sleep(_COLLECT_S)
                with contextlib.suppress(OSError, TimeoutError, ValueError, LookupError):
                    await self._collected(node)

    async def _collected(self, node: Node) -> None:
        said = await node.exec(
            *("rara", "artifact", "gc", "-o", "json", "--blob-store", _BLOBS),
            *("--older-than", "0.5s", "--grace", "0.2s", "--force"),
        )
        self._removed += orjson.loads(said.splitlines()[-1])["removed"]["count"]

    async def memory(self) -> Mapping[str, int]:
        try:
            return await self._project.memory(self._nodes.all)
        except (OSError, TimeoutError):
            return {}

    async def judge(self, confirmed: Sequence[Confirmed]) -> Verdict:
        nodes = self._nodes
        kills = {node.host: node.kills for node in nodes.executors}
        verdict = await judge(
            self.database_url,
            self._folder / "work" / "ledger.jsonl",
            None,
            confirmed,
            kills,
            frozen=self._faults.frozen,
        )
        verdict.violations += await self._checked()
        verdict.blobs_verified = await self._blobs()
        verdict.removed = self._removed
        verdict.violations += self._ends.unasked
        if not verdict.is_clean:
            with contextlib.suppress(OSError, TimeoutError):
                dump = await nodes.database.exec("pg_dump", "-U", "rara", "rara")
                (self._folder / "database.sql").write_text(dump)
        return verdict

    async def _checked(self) -> list[str]:
        """What `rara db check` finds within the project's network, every byte of every blob included."""
        command = ("rara", "db", "check", "--blob-store", _BLOBS, "--blobs", "digest", "-o", "json")
        try:
            said = await self._project.compose(
                "run", "--rm", "--no-deps", "-T", "scheduler", *command, timeout_s=_CHECK_S
            )
        except DockerError as error:
            if error.code != _PROMISE_BROKEN:
                return [f"rara db check: {error}"]
            said = error.said
        return [
            json.dumps(one)
            for one in orjson.loads(said[said.index("{") : said.rindex("}") + 1])["violations"]
        ]

    async def _blobs(self) -> int:
        connection = await asyncpg.connect(self.database_url)
        try:
            return int(
                await connection.fetchval(
                    "select count(*) from rara.blob where marked_at is null and size_bytes > 0"
                )
            )
        finally:
            connection.terminate()


@asynccontextmanager
async def compose(folder: Path, *, name: str, with_go: bool, keep: bool) -> AsyncIterator[Compose]:
    """Built and started. name: of a project that stays; empty: one of its own, which is gone at the end."""
    left_out: dict[Kind, str] = {}
    files = [_FILE, _OVERRIDES / "compose.yml"]
    if name:
        left_out[Kind.DISK_FULL] = "the disks of a project that stays are not small"
    else:
        files.append(_OVERRIDES / "compose.disks.yml")
    if why := clock.why_not():
        left_out[Kind.CLOCK_JUMPED] = why
    else:
        files.append(_OVERRIDES / "compose.clocks.yml")
    if with_go:
        await golang.build(folder, static=True)
        files.append(_OVERRIDES / "compose.go.yml")
    env = _environment(folder)
    project = Project(name or f"rara-chaos-{os.getpid()}-{int(time.time())}", files, env)
    print(f"project {project.name}, images {env['RARA_TAG']}", flush=True)
    has_ended = False
    try:
        yield await _started(project, folder, env, left_out, with_go=with_go)
        has_ended = True
    finally:
        with contextlib.suppress(OSError, TimeoutError):
            (folder / "containers.log").write_text(
                await project.compose("logs", "--no-color", "--timestamps", "--tail", _KEPT_LINES)
            )
        if not name and not (keep and has_ended):
            await project.down()


def _environment(folder: Path) -> dict[str, str]:
    """What the files ask for. Ports stay the same however often their containers start."""
    work = folder / "work"
    work.mkdir()
    work.chmod(0o777)  # the containers' user is not ours
    first = _ports(_COUNT)
    return {
        "RARA_TAG": os.environ.get("RARA_TAG", "chaos"),
        "RARA_PORTS": f"{first}-{first + _COUNT - 1}",
        "RARA_CHAOS_FOLDER": str(folder),
        "RARA_CHAOS_DATABASE_PORT": str(_ports(1)),
        "RARA_CHAOS_FAKETIME": str(clock.library() or ""),
    }


def _ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = lasting_port()
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


async def _started(
    project: Project, folder: Path, env: Mapping[str, str], left_out: dict[Kind, str], *, with_go: bool
) -> Compose:
    languages = ["python-executor", *(["go-executor"] if with_go else [])]
    scales = [f"{service}={_COUNT}" for service in ("scheduler", *languages)]
    await project.up(*scales, *([] if with_go else ["go-executor=0"]))
    nodes = await _nodes(project, languages)
    await project.until_healthy(nodes.all, READY_S)
    if Kind.CLOCK_JUMPED not in left_out and not await _jumps(nodes.schedulers[0]):
        left_out[Kind.CLOCK_JUMPED] = "this machine's libfaketime does not fit into the images"
    for node in (*nodes.schedulers, *nodes.python_executors):
        node.has_clock = Kind.CLOCK_JUMPED not in left_out
    first = int(env["RARA_PORTS"].split("-")[0])
    password = quote(os.environ.get("RARA_DATABASE_PASSWORD", "rara"))
    return Compose(
        project,
        nodes,
        folder,
        f"postgresql://rara:{password}@127.0.0.1:{env['RARA_CHAOS_DATABASE_PORT']}/rara",
        [f"127.0.0.1:{first + number}" for number in range(_COUNT)],
        int(await docker("info", "--format", "{{.NCPU}}")),
        left_out,
    )


async def _nodes(project: Project, languages: Sequence[str]) -> Nodes:
    """Executors of the languages in turns."""
    by_language = [await project.nodes(service) for service in languages]
    (database,) = await project.nodes("database")
    disks = await project.nodes("disks")
    executors = [node for turn in zip(*by_language, strict=True) for node in turn]
    return Nodes(await project.nodes("scheduler"), executors, database, next(iter(disks), None))


async def _jumps(node: Node) -> bool:
    """Whether a clock in the container goes where it is told to."""
    script = f"echo '+{_DAY_S}s' > {CLOCK_FILE}; date +%s; rm -f {CLOCK_FILE}"
    return int(await node.exec("sh", "-c", script)) > time.time() + _DAY_S / 2
