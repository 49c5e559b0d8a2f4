"""docs/evidence.md lists every scenario and every fault case, with tests that exist."""

from support.evidence import CASES, DOCUMENT, SCENARIOS, evidence, rendered


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == rendered(text), "run `python -m support.evidence` in the folder tests"


def test_no_test_claims_to_show_something_unknown() -> None:
    assert sorted({name for item in evidence() for name in item.shows} - {*SCENARIOS, *CASES}) == []
