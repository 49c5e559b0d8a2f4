"""The load generator against a real stack of its own, ended by Ctrl-C: its report adds up."""

import json
import sys
from pathlib import Path

from rara_testing.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
PERCENTILES = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


async def test_a_closed_loop_ends_with_a_report_that_adds_up(tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    command = [sys.executable, str(ROOT / "bench" / "load.py"), "--stack", "--callers", "6", "--seed", "7"]
    command += ["--duration", "0", "--warm-up", "0.5s", "--every", "0.5s", "--sample", "1"]
    command += ["--failing", "0.2", "--flaky", "0.2", "--artifact-bytes", "20000", "--report", str(report)]
    async with Processes(tmp_path) as processes:
        load = await processes.start("load", ["sh", "-c", 'exec "$@" 2>&1', "sh", *command])
        await load.expect_line(r"^ +[2-9]\.\d s .* turns/s", 60)
        load.interrupt()
        assert await load.wait(60) == 0, load.report()
        assert load.children() == []
    said = json.loads(report.read_text())
    assert (said["problems"], said["errors"], said["is_good"]) == ([], {}, True)
    assert said["notes"] == ["stopped as asked"]

    runs = said["runs"]
    assert runs["found"] == runs["started"] == runs["succeeded"] + runs["failed"] + runs["cancelled"]
    assert (runs["start_unknown"], runs["open"], runs["unplanned"]) == (0, 0, 0)
    assert runs["succeeded"]
    assert runs["failed"]

    stages, operations = said["stages"], said["operations"]
    for summary in (*stages.values(), *(of["latency"] for of in operations.values())):
        known = [summary[name] for name in PERCENTILES] if summary["count"] else []
        assert known == sorted(known)
    for stage in ("start_accepted", "ready_to_leased", "leased_to_running", "running_to_terminal"):
        assert stages[stage]["count"], stage
    assert stages["start_to_terminal_seen"]["count"] == operations["watch"]["latency"]["count"]
    assert operations["watch"]["latency"]["count"] == operations["watch"]["turns"]
    assert said["throughput"]["turns_per_s"] > 0

    assert said["check"] == {
        "was_run": True,
        "violations": 0,
        "report": {"rules": said["check"]["report"]["rules"], "broken": [], "violations": []},
    }
    assert {"executor", "postgres", "scheduler"} <= set(said["processes"])
    assert said["processes"]["scheduler"]["cpu_s"] > 0
    tables = said["database"]["end"]["tables"]
    assert tables["result"]["live_tuples"] >= runs["succeeded"]
    assert (tmp_path / "load.svg").stat().st_size > 1000
