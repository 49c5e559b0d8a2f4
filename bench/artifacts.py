"""Measures transfers of one large artifact: MiB a second, growth of memory, lateness of heartbeats.

    .venv/bin/python bench/artifacts.py [--mib 2048] > artifacts.json

Needs `make test`'s environment and Go, and three and a half times the size on the disk of the temporary folder. One
embedded PostgreSQL, one scheduler with a folder as its blob store, one executor in Python and one in Go, all of them
real processes. A step puts the artifact, the next one opens it: from each language to the other. Up is the SDK's put,
its copy into the scratch folder included; down is the SDK's open. Memory is resident, of a process with all its
children, over what it was after a transfer of 1 MiB. Lateness is the longest time between two renewals of a running
step's lease, beyond the heartbeat interval of 1 s, as the database has it.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import asyncpg
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_testing.bulk_transfer import Watch, move
from rara_testing.processes import Process, Processes

ROOT: Final = Path(__file__).resolve().parents[1]
WAYS: Final = (("python", "go"), ("go", "python"))
LEASE_S: Final = 10.0
HEARTBEAT_S: Final = 1.0
MIB: Final = 1 << 20
_ENV: Final = {
    "RARA_LOG_LEVEL": "warning",
    "RARA_LEASE_S": str(LEASE_S),
    "RARA_HEARTBEAT_S": str(HEARTBEAT_S),
    "RARA_SILENCE_S": "5",
}


def _commands(folder: Path) -> dict[str, list[str]]:
    program = folder / "rara-go-probe"
    build = ["go", "build", "-buildvcs=false", "-o", str(program), "./cmd/rara-go-probe"]
    subprocess.run(build, cwd=ROOT / "executors" / "go", check=True)
    return {"python": [sys.executable, "-m", "rara_executor"], "go": [str(program)]}


async def _start(
    processes: Processes, language: str, command: list[str], address: str, folder: Path
) -> Process:
    env = {
        "RARA_SCHEDULER": address,
        "RARA_EXECUTOR_NAME": language,
        "RARA_EXECUTOR_DIR": str(folder / f"executor-{language}"),
        "RARA_EXECUTOR_MODULES": "rara_testing.bulk",  # means nothing to Go
        "RARA_EXECUTOR_PRESTART": "0",
        "RARA_EXECUTOR_CACHE_BYTES": "0",  # so that the disk holds one artifact at a time
        "RARA_LOG_LEVEL": "warning",
    }
    return await processes.start(language, command, env=env, ready="connected to")


async def _run(folder: Path, size_bytes: int) -> list[dict[str, Any]]:
    commands = _commands(folder)
    settings = StackSettings(directory=folder, with_executor=False, env=_ENV)
    async with (
        Stack(settings) as stack,
        Client.connect(stack.address) as client,
        Processes(folder) as processes,
    ):
        database = await asyncpg.connect(stack.dsn)
        assert stack.scheduler.pid is not None
        pids = {"scheduler": stack.scheduler.pid}
        for language, command in commands.items():
            pids[language] = (await _start(processes, language, command, stack.address, folder)).pid
        found = []
        for maker, reader in WAYS:
            await move(client, maker, reader, size_bytes=MIB, seed=1, folder=folder, bound_s=60)
        for maker, reader in WAYS:
            async with Watch(pids, database, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S) as watch:
                moved = await move(
                    client, maker, reader, size_bytes=size_bytes, seed=2, folder=folder, bound_s=1800
                )
            found.append(
                {
                    "from": maker,
                    "to": reader,
                    "up_mib_per_s": round(moved.up_mib_per_s, 1),
                    "down_mib_per_s": round(moved.down_mib_per_s, 1),
                    "growth_mib": {name: round(grown / MIB, 1) for name, grown in watch.growth_bytes.items()},
                    "heartbeat_lateness_s": round(watch.lateness_s, 3),
                }
            )
            print(found[-1], file=sys.stderr)
        await database.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    given = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        found = asyncio.run(_run(Path(folder), given.mib * MIB))
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "go": subprocess.check_output(["go", "version"], text=True).strip(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "artifact_mib": given.mib,
        "transfers": found,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
