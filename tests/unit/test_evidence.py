"""docs/evidence.md lists every scenario and every fault case, with tests that exist."""

from support.evidence import CASES, DOCUMENT, SCENARIOS, Evidence, evidence, rendered, without_proof


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == rendered(text), "run `python -m support.evidence` in the folder tests"


def test_every_scenario_and_case_is_shown_by_a_test_that_make_test_runs() -> None:
    shown = {name for item in evidence() if not item.is_soak for name in item.shows}
    assert sorted({*SCENARIOS, *CASES} - shown) == []


def test_no_test_claims_to_show_something_unknown() -> None:
    assert sorted({name for item in evidence() for name in item.shows} - {*SCENARIOS, *CASES}) == []


def test_a_listed_test_proves_only_what_it_passed() -> None:
    listed = [
        Evidence(name, ("OWN-1",), is_soak=name == "soak", needs=("go",) if name.startswith("go") else ())
        for name in ("passed", "failed", "skipped", "absent", "half", "soak", "go_skipped")
    ]
    passed = {"passed", "half"}
    bad = {"failed", "skipped", "half", "go_skipped"}
    assert without_proof(listed, passed=passed, bad=bad, is_here=lambda _: False) == [
        "failed",
        "skipped",
        "absent",
        "half",
    ]
    assert "go_skipped" in without_proof(listed, passed=passed, bad=bad, is_here=lambda _: True)
