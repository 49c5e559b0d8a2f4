"""Which tests show which scenario and fault case: read from their marks, kept in docs/evidence.md, held to what ran.

    @pytest.mark.case("OWN-1", "S02")
    async def test_a_sweep_leaves_a_step_that_has_moved_on(...): ...

A test may also say `@pytest.mark.needs("containers")`: where that is not here it may be skipped, and the run says so
at its end. `python -m support.evidence`, run in the folder `tests`, writes the document anew.
"""

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support import skewed_clock

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "evidence.md"

SCENARIOS = {
    "S01": "Run and step states: only allowed changes, one close",
    "S02": "Leases and heartbeats under competition: one owner finishes",
    "S03": "Retry and idempotency: a fault at every point, one effect",
    "S04": "Cancel and deadline: process tree and row are both closed",
    "S05": "Routing: only compatible executors, refusals are free",
    "S06": "Progress and artifacts: order, finality and lineage over cut streams",
    "S07": "Restart smoke: executor, scheduler and PostgreSQL killed, singly and together",
}
CASES = {
    "OWN-1": "a sweep that read a step before it finished",
    "OWN-2": "late events of a superseded attempt",
    "OWN-3": "heartbeats and sweeps after success",
    "STR-1": "a dead executor whose record is pruned first",
    "STR-2": "a restart under the same name inside the lease",
    "STR-3": "one step of a batch that cannot be dispatched",
    "STR-4": "a page of rows that a sweep has to skip",
    "DEAD-1": "work longer than a lease; settings that would allow a false death",
    "DEAD-2": "handlers that block the loop or hold the interpreter lock",
    "DEAD-3": "an executor that is cut off fences itself",
    "RETRY-1": "crashes spend the budget",
    "RETRY-2": "backoff at any number of failures",
    "RETRY-3": "an error that cannot heal is final",
    "CANCEL-1": "cancel while waiting",
    "CANCEL-2": "cancel while the listener is away",
    "CANCEL-3": "handlers that never confirm",
    "TIME-1": "processes whose clocks disagree",
    "TIME-2": "a deadline that passes while nothing runs",
    "TIME-3": "deadline, cancel and shutdown are told apart",
    "AGG-1": "the last two steps finish together",
    "AGG-2": "doubled events and early answers",
    "ORDER-1": "a gap before the terminal event",
    "ORDER-2": "the newest progress is what is kept",
    "STREAM-1": "a stream that is dead in one direction",
    "STREAM-2": "a lease whose request never arrived",
    "STREAM-3": "keepalive settings that fit each other",
    "STREAM-4": "fast events and a slow database",
    "PROC-1": "handlers that start processes",
    "PROC-2": "a panic costs its own step only",
    "PROC-3": "cancelled streams leave nothing behind",
    "PAY-1": "U+0000 and lone surrogates",
    "PAY-2": "error texts that are not UTF-8",
    "PAY-3": "payloads over the limit",
    "PAY-4": "a secret in any text",
    "DBC-1": "cancelled waits for a connection",
    "DBC-2": "a lost LISTEN connection",
    "DBC-3": "PostgreSQL restarts",
    "DBC-4": "PgBouncer in transaction mode",
    "DBL-1": "batch writers in opposite order",
    "DBL-2": "no transaction over anything but SQL",
    "DBL-3": "notifications do not serialise commits",
    "DBL-4": "retention keeps up and removes nothing live",
    "STOP-1": "a stop with open streams",
    "STOP-2": "SIGTERM reaches the service in its container",
    "ROUTE-1": "an executor that does not know the kind",
    "ROUTE-2": "a blocked kind at the head of the queue",
    "IDEM-1": "one key submitted by many at once",
    "IDEM-2": "a manifest for an upload that never ended",
}
_REGION = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A marked test: its node id without parameters, what it shows, and what it needs to run."""

    node: str
    shows: tuple[str, ...]
    is_soak: bool
    needs: tuple[str, ...]


def _marks(decorators: list[ast.expr]) -> dict[str, tuple[str, ...]]:
    """The names of `pytest.mark.NAME(...)`, each with its literal arguments."""
    found: dict[str, tuple[str, ...]] = {}
    for decorator in decorators:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = call.func if call else decorator
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "pytest.mark":
            words = [a.value for a in call.args if isinstance(a, ast.Constant)] if call else []
            found[target.attr] = (*found.get(target.attr, ()), *map(str, words))
    return found


def _module_marks(tree: ast.Module) -> list[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return []


@cache
def evidence() -> tuple[Evidence, ...]:
    """Every marked test under tests/, by node id."""
    return tuple(sorted(_scan(), key=lambda shown: shown.node))


def _scan() -> Iterator[Evidence]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_module = _module_marks(tree)
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not function.name.startswith("test_"):
                continue
            marks = _marks([*of_module, *function.decorator_list])
            if marks.get("case"):
                node = f"{path.relative_to(ROOT).as_posix()}::{function.name}"
                yield Evidence(node, marks["case"], "soak" in marks, marks.get("needs", ()))


def is_here(need: str) -> bool:
    """Whether this machine has what a test needs. Raises KeyError for a need that nobody knows."""
    return _NEEDS[need]()


@cache
def _has_containers() -> bool:
    """An engine that answers, and the compose plugin."""
    if shutil.which("docker") is None:
        return False
    commands = (["docker", "info"], ["docker", "compose", "version"])
    try:
        return all(subprocess.run(line, capture_output=True, timeout=20).returncode == 0 for line in commands)
    except subprocess.TimeoutExpired:
        return False


def _has_go() -> bool:
    return shutil.which("go") is not None


def _has_pgbouncer() -> bool:
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") is not None


_NEEDS: dict[str, Callable[[], bool]] = {
    "containers": _has_containers,
    "go": _has_go,
    "pgbouncer": _has_pgbouncer,
    "faketime": lambda: skewed_clock.library() is not None,
}


def without_proof(
    listed: Iterable[Evidence], *, passed: set[str], bad: set[str], is_here: Callable[[str], bool]
) -> list[str]:
    """Nodes of which a whole run without the soak tests should have passed every case, and did not.

    passed, bad: nodes of which a case passed; of which one failed, was in error or was skipped.
    """
    return [
        item.node
        for item in listed
        if not item.is_soak
        and all(map(is_here, item.needs))
        and (item.node not in passed or item.node in bad)
    ]


def rendered(document: str) -> str:
    """The document with its tables made anew."""
    titles = {"scenarios": SCENARIOS, "cases": CASES}
    return _REGION.sub(lambda match: f"{match[1]}\n{_table(titles[match['name']])}\n{match[3]}", document)


def _table(titles: dict[str, str]) -> str:
    lines = ["| Id | What | Shown by |", "| --- | --- | --- |"]
    for name, title in titles.items():
        shown = [_cell(item) for item in evidence() if name in item.shows]
        lines.append(f"| {name} | {title} | {'<br>'.join(shown)} |")
    return "\n".join(lines) + "\n"


def _cell(item: Evidence) -> str:
    notes = [*(["`make soak`"] if item.is_soak else []), *(f"needs {need}" for need in item.needs)]
    return f"`{item.node}`" + (f" ({', '.join(notes)})" if notes else "")


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
