"""What a measurement ran on, and what else used the processors meanwhile (Linux)."""

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Self

import psutil

_PACKAGES: Final = (
    "absurd-sdk",
    "asyncpg",
    "dbos",
    "grpcio",
    "oban",
    "pgqueuer",
    "procrastinate",
    "protobuf",
    "rara",
    "uvloop",
)


def facts(folder: Path) -> dict[str, object]:
    """Processor, memory, disk and system, without names of people or places."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(folder),
        "load_before": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    """Of all that takes part; what is absent is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found |= {"commit": _said(["git", "rev-parse", "--short", "HEAD"])}
    found |= {"go": _said(["go", "env", "GOVERSION"])}
    return {name: version for name, version in found.items() if version}


def cpu_s(pids: list[int]) -> float:
    """Seconds that these processes, and all below them that live or were waited for, have computed."""
    total = 0.0
    for process in _trees(pids):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True, slots=True)
class Watch:
    """How busy the machine was since `begin`, and how much of that was not this benchmark."""

    busy_s: float
    own_s: float
    all_s: float

    @classmethod
    def begin(cls) -> Self:
        times = psutil.cpu_times()
        idle_s = times.idle + times.iowait
        # guest time is part of user time
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return cls(busy_s=all_s - idle_s, own_s=cpu_s([os.getpid()]), all_s=all_s)

    def shares(self) -> tuple[float, float]:
        """(busy, others): shares of all processors."""
        return shares(self, Watch.begin())


def shares(before: Watch, after: Watch) -> tuple[float, float]:
    elapsed_s = max(after.all_s - before.all_s, 0.01)
    busy_s = after.busy_s - before.busy_s
    others_s = max(0.0, busy_s - (after.own_s - before.own_s))  # ticks are counted coarsely
    return round(busy_s / elapsed_s, 3), round(others_s / elapsed_s, 3)


def _trees(pids: list[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        try:
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
