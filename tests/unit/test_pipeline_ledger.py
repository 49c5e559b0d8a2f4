"""The ledger: one effect for a key, and no word from a superseded attempt."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from knowledge_pipeline import ledger


def write(path: Path, *, key: str = "k", effect: str = "publish", token: int = 7) -> dict[str, object]:
    return ledger.record(path, idempotency_key=key, effect=effect, lease_token=token, values={"mrr": 0.5})


def applied(path: Path) -> list[bool]:
    return [bool(entry["applied"]) for entry in ledger.entries(path)]


def test_a_repeated_call_is_written_down_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = write(path, token=7)
    assert write(path, token=8) == first == {"number": 1, "effect": "publish"}
    assert applied(path) == [True, False]


def test_other_effects_and_other_keys_are_effects_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path)
    write(path, effect="open")
    write(path, key="other")
    assert applied(path) == [True, True, True]


def test_an_older_lease_is_turned_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, effect="open", token=9)
    with pytest.raises(ledger.Superseded, match="lease 8"):
        write(path, token=8)
    assert applied(path) == [True]
    write(path, key="other", token=1)


def test_a_line_that_a_crash_cut_off_counts_as_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"number": 2, "idempo')
    assert write(path, key="other")["number"] == 2
    assert applied(path) == [True, True]


def test_callers_at_the_same_time_write_one_effect(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda _: write(path), range(40)))
    assert {receipt["number"] for receipt in receipts} == {1}
    assert applied(path).count(True) == 1
    assert len(applied(path)) == 40
