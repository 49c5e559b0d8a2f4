"""Measures what telemetry costs a scheduler: processor time a step with it off, with metrics, with traces.

    .venv/bin/python bench/telemetry.py [--steps 1000] [--rounds 3] > telemetry.json

Needs `make test`'s environment. One embedded PostgreSQL; a scheduler and a Python executor of its own for each turn.
Processor time, since it says the same on a busy machine. The receiver of spans and metrics is a port that nobody
listens on: dropping is the dearest that sending can be.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

import psutil
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_testing.ports import free_port

STEPS_A_RUN: Final = 10
LIMIT_S: Final = 300.0


def modes() -> dict[str, dict[str, str]]:
    """Settings by what is on."""
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    return {
        "off": {},
        "metrics": {"RARA_METRICS_LISTEN": f"127.0.0.1:{free_port()}"},
        "traces of 1 %": nowhere
        | {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
        "traces of all": nowhere,
    }


async def measure(folder: Path, env: dict[str, str], steps: int) -> float:
    """The scheduler's processor time for a step, in ms."""
    env = {"RARA_LOG_LEVEL": "warning", "RARA_EXECUTOR_MODULES": "rara_testing.probes"} | env
    async with (
        Stack(StackSettings(directory=folder, env=env)) as stack,
        Client.connect(stack.address) as client,
    ):
        noop = [workflow_pb2.StepDefinition(step_name=f"s{n}", kind="probe.echo") for n in range(STEPS_A_RUN)]
        await client.register_definition(workflow_pb2.Definition(definition="noop", steps=noop))
        scheduler = psutil.Process(stack.scheduler.pid)
        began_s = sum(scheduler.cpu_times()[:2])
        runs = [(await client.start_run("noop")).run.workflow_run_id for _ in range(steps // STEPS_A_RUN)]
        async with asyncio.timeout(LIMIT_S):
            for run_id in runs:
                while not (await client.get_run(run_id)).run.HasField("ended_at"):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        return float(1000 * (sum(scheduler.cpu_times()[:2]) - began_s) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    load_before = os.getloadavg()
    for _ in range(given.rounds):
        for name, env in modes().items():
            with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
                found.setdefault(name, []).append(asyncio.run(measure(Path(folder), env, given.steps)))
            print(name, f"{found[name][-1]:.3f} ms", file=sys.stderr)
    medians = {name: median(values) for name, values in found.items()}
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "scheduler_cpu_ms_per_step": {name: round(value, 3) for name, value in medians.items()},
        "ratio_to_off": {name: round(value / medians["off"], 3) for name, value in medians.items()},
        "rounds": found,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
