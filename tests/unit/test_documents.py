"""The reference documents say what the code does."""

import re
from pathlib import Path

import pytest
from rara.v1 import workflow_pb2
from rara_cli.exits import Exit
from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import Ending, RetryPolicy, judge
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.step import StepState
from rara_scheduler.transport.status import STATUS
from support.documents import REFERENCE, ROOT, rendered

_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


def section(document: str, title: str) -> str:
    """The text below one heading of the second level."""
    return document.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    return [[cell.strip() for cell in row.split("|")] for row in _ROW.findall(text)][2:]


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.md")), ids=lambda path: path.name)
def test_what_is_made_from_code_is_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == rendered(text), "run `python -m support.documents` in the folder tests"


@pytest.mark.parametrize(
    ("title", "states"), [("Step run", StepState), ("Workflow run", RunState)], ids=["step", "run"]
)
def test_every_state_is_explained(title: str, states: type[StepState] | type[RunState]) -> None:
    text = section((REFERENCE / "states.md").read_text(encoding="utf-8"), title)
    meanings = text.split("| State | Entered when |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", meanings, re.MULTILINE) == list(states)


def test_the_contract_has_the_same_states() -> None:
    for prefix, enum, states in (
        ("STEP_RUN_STATE_", workflow_pb2.StepRunState, list(StepState)),
        ("WORKFLOW_RUN_STATE_", workflow_pb2.WorkflowRunState, list(RunState)),
    ):
        names = [f"{prefix}{name}" for name in ("UNSPECIFIED", *(state.upper() for state in states))]
        assert sorted(enum.keys()) == sorted(names)


# ---------------------------------------------------------------- failures


FAILURES = (REFERENCE / "failures.md").read_text(encoding="utf-8")
POLICY = RetryPolicy(max_attempts=3)
CLOSED_BY_THE_DATABASE = {Code.UPSTREAM_FAILED, Code.NO_CAPABLE_EXECUTOR}
ASKED_FOR = {Code.CANCELLED, Code.SIBLING_FAILED, Code.DEADLINE_EXCEEDED}


def meaning_for_an_attempt(code: Code) -> str:
    """What the second column has to say."""
    if code in CLOSED_BY_THE_DATABASE:
        return "closes: `cancelled`"
    if code is Code.ATTEMPTS_EXHAUSTED:
        spent = judge(
            StepError(Code.INTERNAL), POLICY, failures=2, free_endings=0, cancel_reason=None, jitter=0.5
        )
        assert (spent.ending, spent.reason) == (Ending.FAILED, Code.ATTEMPTS_EXHAUSTED)
        return "closes: `terminal_failed`"
    cancel_reason = code if code in ASKED_FOR else None
    verdict = judge(
        StepError(code), POLICY, failures=0, free_endings=0, cancel_reason=cancel_reason, jitter=0.5
    )
    assert verdict.reason == code
    if code in ASKED_FOR:
        return {Ending.FAILED: "closes: `terminal_failed`", Ending.CANCELLED: "closes: `cancelled`"}[
            verdict.ending
        ]
    return {Ending.BACKOFF: "spends", Ending.AVAILABLE: "free", Ending.FAILED: "final"}[verdict.ending]


def test_what_a_code_does_to_an_attempt_is_as_the_reference_says() -> None:
    for code, attempt, meaning in rows(section(FAILURES, "What ends an attempt or a step")):
        assert attempt == meaning_for_an_attempt(Code(code.strip("`"))), code
        assert meaning


def test_the_status_of_a_code_is_as_the_reference_says() -> None:
    for code, status, _ in rows(section(FAILURES, "What a call ends with")):
        assert status.strip("`") == STATUS[Code(code.strip("`"))].name, code


def test_the_reference_lists_every_code() -> None:
    listed = [
        row[0].strip("`")
        for title in ("What ends an attempt or a step", "What a call ends with")
        for row in rows(section(FAILURES, title))
    ]
    assert set(listed) == set(Code)


def test_the_reference_lists_every_exit_code() -> None:
    listed = [int(row[0]) for row in rows(section(FAILURES, "What `rara` exits with"))]
    assert listed == [code.value for code in Exit]


# ---------------------------------------------------------------- links

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def links(path: Path) -> list[tuple[str, str]]:
    """Text and target of each link of a document, code blocks left out."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [(match[1], match[2]) for match in _LINK.finditer(text)]


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for _, target in links(path):
        if "://" not in target and not target.startswith("#"):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_that_a_document_names_exists(path: Path) -> None:
    for text, target in links(path):
        name = text.strip("`")
        if target.endswith(".py") and name.startswith("test_"):
            code = (path.parent / target).read_text(encoding="utf-8")
            assert re.search(rf"\bdef {name}\(", code), f"{target}: {name}"
