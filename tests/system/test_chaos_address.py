"""The chaos runner against a system that somebody else started: what it brings, and how it judges from outside."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from rara_chaos.executorfaults import KINDS, LINK_KINDS
from rara_chaos.schedule import Kind
from rara_testing.processes import Processes
from support.bearers import make_token
from support.certificates import Authority
from support.scheduler_process import start_scheduler

CHAOS_S = 240.0  # on a busy machine


async def chaos(processes: Processes, *options: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Its last line; AssertionError with all lines unless it ends well."""
    command = [sys.executable, "-m", "rara_chaos", "--no-go", *options]
    process = await processes.start("chaos", command, env=env)
    lines = await process.output(CHAOS_S)
    assert process.returncode == 0, "\n".join(lines)
    said: dict[str, Any] = json.loads(lines[-1])
    assert (said["target"], said["violations"], said["lost"], said["stranded"]) == ("address", 0, 0, 0)
    assert said["runs"] > 0
    assert 0 < said["steps"] <= said["attempts"]
    return said


async def test_hooks_and_faults_of_own_executors_and_a_verdict_from_answers_alone(
    database_url: str, tmp_path: Path
) -> None:
    hooked = tmp_path / "hooked"
    async with Processes(tmp_path) as processes:
        _, address = await start_scheduler(processes, database_url, tmp_path)
        hook = f'echo "$HOLD_S" >> {hooked}'
        said = await chaos(
            processes,
            *("--address", address, "--seed", "2", "--duration", "4", "--every", "0.4", "--hook", hook),
        )
    assert said["faults"][Kind.HOOK] == len(hooked.read_text().splitlines()) > 0
    assert all(said["faults"].values())
    assert set(said["faults"]) <= {*KINDS, *LINK_KINDS, Kind.HOOK}


@pytest.mark.soak
async def test_the_history_checker_judges_where_the_database_is_given(
    database_url: str, tmp_path: Path
) -> None:
    async with Processes(tmp_path) as processes:
        _, address = await start_scheduler(processes, database_url, tmp_path)
        options = ("--address", address, "--database-url", database_url, "--duration", "20", "--every", "1")
        said = await chaos(processes, *options)
    assert set(said["faults"]) == {*KINDS, *LINK_KINDS}
    assert said["figures"]["tables"]["end"]["result"]["rows"] > 0


@pytest.mark.soak
async def test_certificates_and_a_token_for_each_role_are_used(database_url: str, tmp_path: Path) -> None:
    authority = Authority.new(tmp_path)
    pair = authority.pair("scheduler")
    async with Processes(tmp_path) as processes:
        _, address = await start_scheduler(
            processes, database_url, tmp_path, auth="tokens", tls_cert=pair.certificate, tls_key=pair.key
        )
        raw = await asyncpg.connect(database_url)
        env = {
            "RARA_TLS_CA": str(authority.file),
            "RARA_TOKEN": await make_token(raw, "client"),
            "RARA_CHAOS_EXECUTOR_TOKEN": await make_token(raw, "executor", name="farm"),
        }
        await raw.close()
        said = await chaos(processes, "--address", address, "--duration", "10", "--every", "1", env=env)
    assert set(said["faults"]) == set(KINDS)


async def test_an_address_without_a_port_is_refused(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        command = [sys.executable, "-m", "rara_chaos", "--address", "127.0.0.1", "--executors", "0"]
        process = await processes.start("chaos", command)
        await process.output()
        assert process.returncode == 2
        assert "must be HOST:PORT, not '127.0.0.1'" in process.report()
