"""What the processes under load use, where they can be seen: by process id, or as containers on this machine."""

import asyncio
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import psutil

_DOCKER_S = 20.0


@dataclass(frozen=True, slots=True)
class Use:
    """Of a process and its descendants.

    memory_bytes: shared pages count once where the system tells, else in each process.
    """

    pid: int
    processes: int
    memory_bytes: int
    cpu_s: float

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "cpu_s": round(self.cpu_s, 3)}


def use_of(pid: int, *, with_children: bool = True) -> Use | None:
    """None: it is gone, or cannot be seen from here."""
    try:
        process = psutil.Process(pid)
        tree = [process, *(process.children(recursive=True) if with_children else ())]
    except psutil.Error:
        return None
    memory_bytes, cpu_s = 0, 0.0
    for one in tree:
        try:
            times = one.cpu_times()
            cpu_s += times.user + times.system
            if one.pid == pid and with_children:  # those that have ended and were waited for
                cpu_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            memory_bytes += _memory_bytes(one)
        except psutil.Error:  # ended meanwhile
            continue
    return Use(pid, len(tree), memory_bytes, cpu_s)


def _memory_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", 0) or full.rss)


@dataclass(slots=True)
class Machine:
    """pids: by name. compose_project: its containers are found anew each time, since they may have been restarted."""

    pids: Mapping[str, int]
    compose_project: str = ""

    async def use(self) -> dict[str, Use]:
        """By name; what cannot be seen is left out."""
        pids = dict(self.pids)
        if self.compose_project:
            pids |= await asyncio.to_thread(_container_pids, self.compose_project)
        found = await asyncio.to_thread(lambda: {name: use_of(pid) for name, pid in pids.items()})
        return {name: use for name, use in found.items() if use is not None}


def _container_pids(project: str) -> dict[str, int]:
    """The first process of each container, by service and number. Raises OSError where there is no engine."""
    label = f"label=com.docker.compose.project={project}"
    ids = _docker("ps", "--quiet", "--filter", label).split()
    if not ids:
        raise OSError(f"no container of the project {project} is running")
    return {_name(one): one["State"]["Pid"] for one in json.loads(_docker("inspect", *ids))}


def _name(inspected: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    labels = inspected["Config"]["Labels"]
    return f"{labels['com.docker.compose.service']}-{labels['com.docker.compose.container-number']}"


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_DOCKER_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"docker {arguments[0]} had not ended after {_DOCKER_S:g} s") from error
    if ended.returncode:
        raise OSError(f"docker {arguments[0]} failed: {ended.stderr.strip()}")
    return ended.stdout


def compared(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, object]:
    """Both, and the processor time between them; None for a process that was started in between."""
    found: dict[str, object] = {}
    for name in _names(before, after):
        first, last = before.get(name), after.get(name)
        is_same = first is not None and last is not None and first.pid == last.pid
        used_s = last.cpu_s - first.cpu_s if is_same and first is not None and last is not None else None
        found[name] = {
            "start": first and first.as_json(),
            "end": last and last.as_json(),
            "cpu_s": None if used_s is None else round(used_s, 3),
        }
    return found


def _names(*uses: Iterable[str]) -> list[str]:
    return sorted({name for use in uses for name in use})
