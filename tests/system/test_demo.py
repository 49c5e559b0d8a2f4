"""`rara dev demo` as a newcomer runs it: a process, an empty folder, an exit code, a result."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from support.command_line import Ended, rara_process
from support.go_executor import program
from support.text_folders import write_library_heads
from support.transcripts import ANY_LINES, differences

ROOT = Path(__file__).parents[2]
DEMO_S = 120.0
CRASH_S = 240.0


async def finish(process: asyncio.subprocess.Process, within_s: float) -> Ended:
    """Wait for the demo's end; it is killed when that takes too long."""
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode(), out)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Fills Go's cache, where Go is here: a demo waits for its own build only so long."""
    if shutil.which("go"):
        program("rara-go-executor")


async def demo(
    tmp_path: Path, *arguments: str, within_s: float = DEMO_S, path: str = os.environ["PATH"]
) -> tuple[Ended, Any]:
    """How it ended, and its result; temporary folders are made in `tmp_path/tmp`."""
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    result = tmp_path / "demo-result.json"
    process = await rara_process(
        "dev", "demo", "--result", str(result), *arguments, env={"TMPDIR": str(temporary), "PATH": path}
    )
    ended = await finish(process, within_s)
    return ended, json.loads(result.read_bytes()) if result.exists() else None


@pytest_asyncio.fixture(scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Any, Path]:
    """A demo without options: how it ended, its result, and the folder that it was given."""
    folder = tmp_path_factory.mktemp("demo")
    ended, result = await demo(folder)
    return ended, result, folder


async def test_the_demo_goes_from_an_empty_folder_to_figures_artifacts_and_lineage(
    plain: tuple[Ended, Any, Path],
) -> None:
    ended, result, _ = plain
    assert (ended.code, ended.err) == (0, "")
    assert result["run"]["state"] == "succeeded"
    assert result["faults"] == []
    steps = [step["step_run"] for step in result["steps"]]
    assert [(step["step_name"], step["state"], step["attempt"]) for step in steps] == [
        (name, "succeeded", 1) for name in ("collect", "clean", "index", "evaluate", "adapt")
    ]
    tokens = [step["attempts"][0]["lease"]["lease_token"] for step in result["steps"]]
    assert [int(token) for token in tokens] == sorted({int(token) for token in tokens})
    figures = result["figures"]
    assert figures["queries"] == steps[0]["output"]["documents"]
    assert 0.3 < figures["recall_at_1"] < figures["mrr"] < figures["recall_at_10"] < 0.99
    assert f"recall@1 {figures['recall_at_1']:.3f}" in ended.out
    assert f"mean reciprocal rank {figures['mrr']:.3f}" in ended.out
    assert [
        (artifact["name"], artifact["step_name"], artifact["used_by"]) for artifact in result["artifacts"]
    ] == [
        ("corpus", "collect", ["clean"]),
        ("documents", "clean", ["index", "adapt"]),
        ("index", "index", ["evaluate"]),
        ("metrics", "evaluate", ["adapt as baseline"]),
        ("report", "evaluate", []),
        ("model", "adapt", []),
        ("report", "adapt", []),
    ]
    for artifact in result["artifacts"]:
        assert artifact["digest"]["sha256"][:12] in ended.out


def shown(section: str) -> tuple[str, ...]:
    """What a section of docs/start.md shows."""
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        r"```text\n(.*?)```", page.partition(f"\n## {section}")[2].partition("\n## ")[0], re.DOTALL
    )
    return tuple(str(found).splitlines())


@pytest.mark.parametrize("target", ["demo", "demo-crash"])
def test_make_runs_the_demo(target: str) -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "-n", target], cwd=ROOT, check=True, capture_output=True, text=True
    )
    command = ".venv/bin/rara dev demo" + (" --crash" if target == "demo-crash" else "")
    assert made.stdout.splitlines()[-1] == command


async def test_the_demo_prints_what_the_document_shows(plain: tuple[Ended, Any, Path]) -> None:
    ended, _, _ = plain
    assert not differences(
        (ANY_LINES, *shown("1. "), ANY_LINES),
        ended.out.replace("knowledge-pipeline-go", "knowledge-pipeline"),
    )


async def test_the_demo_ends_with_the_lineage_of_its_index(plain: tuple[Ended, Any, Path]) -> None:
    ended, result, _ = plain
    digest = {artifact["name"]: artifact["digest"]["sha256"] for artifact in result["artifacts"]}
    lineage = result["index_lineage"]
    assert lineage["artifact"]["sha256"] == digest["index"]
    assert lineage["is_complete"]
    run_id = result["run"]["workflow_run_id"]
    upstream, downstream = (
        {
            (edge["step_name"], edge["artifact_name"], edge["artifact"]["sha256"], edge["produced"])
            for edge in lineage[direction]
            if edge["workflow_run_id"] == run_id
        }
        for direction in ("upstream", "downstream")
    )
    assert upstream == {
        ("index", "index", digest["index"], True),
        ("index", "documents", digest["documents"], False),
        ("clean", "documents", digest["documents"], True),
        ("clean", "corpus", digest["corpus"], False),
        ("collect", "corpus", digest["corpus"], True),
    }
    assert {(step, name, produced) for step, name, _, produced in downstream} == {
        ("evaluate", "index", False),
        ("evaluate", "metrics", True),
        ("evaluate", "report", True),
        ("adapt", "baseline", False),
        ("adapt", "model", True),
        ("adapt", "report", True),
    }
    tree = ended.out.split("\nWhere the index comes from")[1].split("\nThe same pipeline")[0]
    for name in ("documents", "corpus", "metrics", "model"):
        assert f"{name}  {digest[name][:12]}" in tree


async def test_the_demo_ends_with_what_one_changed_parameter_makes_of_a_second_run(
    plain: tuple[Ended, Any, Path],
) -> None:
    ended, result, _ = plain
    comparison = result["comparison"]
    assert comparison["result"] == "different"
    assert comparison["given"] == [{"kind": "input", "what": "/tokenizer", "b": "porter"}]
    assert [(step["step_name"], step["verdict"]) for step in comparison["steps"]] == [
        ("index", "cause"),
        ("evaluate", "consequence"),
        ("adapt", "consequence"),
        ("collect", "same_result"),
        ("clean", "same"),
    ]
    steps = {step["step_name"]: step for step in comparison["steps"]}
    assert steps["index"]["causes"] == comparison["given"]
    followed = {
        name: [cause["what"] for cause in steps[name]["causes"] if cause["kind"] == "upstream"]
        for name in ("evaluate", "adapt")
    }
    assert followed == {"evaluate": ["index"], "adapt": ["evaluate"]}
    changes = {(change["kind"], change["what"]): change for change in steps["evaluate"]["changes"]}
    mrr, metrics = changes["output", "/mrr"], changes["artifact", "metrics"]
    assert mrr["a"] == result["figures"]["mrr"]
    assert mrr["delta"] == pytest.approx(mrr["b"] - mrr["a"], abs=1e-12) != 0
    first = {artifact["name"]: artifact["digest"]["sha256"] for artifact in result["artifacts"]}
    assert metrics["a"]["sha256"] == first["metrics"] != metrics["b"]["sha256"]
    kept = f"collect and clean made the same bytes again: corpus {first['corpus'][:12]}, documents"
    assert f"{kept} {first['documents'][:12]}.\n" in ended.out
    assert (
        '3 of 5 steps differ: index because of input /tokenizer none → "porter";'
        " evaluate and adapt follow from that.\n"
    ) in ended.out


async def test_what_the_demo_prints_into_a_pipe_is_plain_and_short(plain: tuple[Ended, Any, Path]) -> None:
    ended, _, _ = plain
    assert "\x1b" not in ended.out
    assert "\r" not in ended.out
    assert 20 < len(ended.lines) < 110
    assert max(len(line) for line in ended.lines) <= 120


async def test_a_successful_demo_leaves_only_its_result(plain: tuple[Ended, Any, Path]) -> None:
    _, _, folder = plain
    assert list((folder / "tmp").iterdir()) == []
    assert sorted(path.name for path in folder.iterdir()) == ["demo-result.json", "tmp"]


@pytest_asyncio.fixture(scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Ended, Any]]]:
    """Two demos in one folder: the second one finds a Go that is too old."""
    home = tmp_path_factory.mktemp("two")
    old_go = home / "bin" / "go"
    old_go.parent.mkdir()
    old_go.write_text("#!/bin/sh\necho 'go: go.mod requires go >= 1.26.0 (running go 1.21.0)' >&2\nexit 1\n")
    old_go.chmod(0o755)
    paths = (os.environ["PATH"], f"{old_go.parent}:{os.environ['PATH']}")
    folder = home / "data"
    return folder, [await demo(home, "--dir", str(folder), path=path) for path in paths]


async def test_a_named_folder_is_kept_and_serves_the_next_demo_too(
    two: tuple[Path, list[tuple[Ended, Any]]],
) -> None:
    folder, demos = two
    for ended, result in demos:
        assert ended.code == 0
        assert result["run"]["definition_version"] == 1
    assert len({result["run"]["workflow_run_id"] for _, result in demos}) == 2
    assert {"postgres", "blobs", "logs"} <= {path.name for path in folder.iterdir()}


@pytest.mark.needs("go")
async def test_the_demo_cleans_in_go_or_in_python_with_the_same_result_and_says_which(
    two: tuple[Path, list[tuple[Ended, Any]]],
) -> None:
    _, ((first, in_go), (second, in_python)) = two
    assert "clean goes to the Go executor, the other steps to the Python one\n" in first.out
    assert (
        "clean goes to the Python executor: "
        "`go build` failed: go: go.mod requires go >= 1.26.0 (running go 1.21.0)\n"
    ) in second.out
    assert _executors(in_go) == ["demo", "demo-go", "demo", "demo", "demo"]
    assert _executors(in_python) == ["demo"] * 5
    assert _cleaned(in_go) == _cleaned(in_python)
    # Byte for byte, and so is all that was made of it.
    assert _made(in_go) == _made(in_python)


def _executors(result: Any) -> list[str]:
    return [step["step_run"]["executor_name"] for step in result["steps"]]


def _made(result: Any) -> list[tuple[str, str, str]]:
    return [
        (artifact["step_name"], artifact["name"], artifact["digest"]["sha256"])
        for artifact in result["artifacts"]
    ]


def _cleaned(result: Any) -> tuple[Any, list[Any]]:
    """What `clean` left: its output, its artifact by digest and metadata."""
    outputs = {step["step_run"]["step_name"]: step["step_run"]["output"] for step in result["steps"]}
    made = [artifact for artifact in result["artifacts"] if artifact["step_name"] == "clean"]
    kept = ("name", "type", "media_type", "digest", "metadata")
    return outputs["clean"], [{key: artifact.get(key) for key in kept} for artifact in made]


@pytest.mark.soak
async def test_the_demo_reads_a_folder_of_a_thousand_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    expected = write_library_heads(folder, 1_200)
    ended, result = await demo(tmp_path, "--corpus", str(folder))
    assert ended.code == 0
    assert result["figures"]["queries"] == expected > 1_000
    assert result["run"]["input"]["corpus"] == str(folder)


async def test_a_demo_without_texts_fails_with_the_reason_and_keeps_its_logs(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    ended, result = await demo(tmp_path, "--corpus", str(folder))
    assert ended.code == 10
    assert f"Not as it should be: the run failed: CORPUS_EMPTY no document in {folder}" in ended.out
    assert "Traceback" not in ended.out + ended.err
    assert result["figures"] == {}
    (kept,) = (tmp_path / "tmp").iterdir()
    assert {"scheduler.log", "executor.log"} <= {path.name for path in (kept / "logs").iterdir()}
    assert f"data and logs are kept in {kept}" in ended.out


async def test_ctrl_c_ends_the_demo_and_all_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    process = await rara_process(
        "dev", "demo", "--dir", str(folder), "--result", str(tmp_path / "result.json")
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"starting the executor" not in await process.stdout.readline():
            pass
    parts = psutil.Process(process.pid).children(recursive=True)
    assert len(parts) >= 2
    process.send_signal(signal.SIGINT)
    ended = await finish(process, 60)
    assert ended.code == 130
    assert ended.err == "rara: INTERRUPTED: interrupted\n"
    async with asyncio.timeout(20):
        for part in parts:
            while part.is_running() and part.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)


async def test_the_crash_demo_recovers_from_both_kills_with_one_result_a_step(tmp_path: Path) -> None:
    ended, result = await demo(tmp_path, "--crash", within_s=CRASH_S)
    assert (ended.code, ended.err, result["faults"]) == (0, "", []), ended.out
    executor, scheduler = result["crash"]["crashes"]
    assert (executor["victim"], executor["step_name"]) == ("executor", "evaluate")
    assert (executor["attempt_at_kill"], executor["attempt_after"]) == (1, 2)
    # A lease of 10 s, a sweep each second, half a second of backoff, and what a busy machine adds.
    assert executor["process_back_after_s"] < executor["step_moving_again_after_s"] < 30
    assert (scheduler["victim"], scheduler["step_name"]) == ("scheduler", "adapt")
    assert (scheduler["attempt_at_kill"], scheduler["attempt_after"]) == (1, 1)
    assert scheduler["step_moving_again_after_s"] < 30
    attempts = {step["step_run"]["step_name"]: step["attempts"] for step in result["steps"]}
    assert {name: [attempt["reason"] for attempt in made] for name, made in attempts.items()} == {
        "collect": [""],
        "clean": [""],
        "index": [""],
        "evaluate": ["LEASE_EXPIRED", ""],
        "adapt": [""],
    }
    assert result["comparison"] is None  # one run is enough to be crashed
    assert result["crash"]["effects"]["done"] == {
        "open-evaluation": 1,
        "open-experiment": 1,
        "publish-settings": 1,
    }
    assert not differences((ANY_LINES, *shown("2. "), ANY_LINES), ended.out, figures_vary=True)
