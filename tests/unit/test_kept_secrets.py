"""What a handler keeps for its next attempt comes back as it was, or the step fails: it is never redacted."""

import json

import pytest
from rara.v1 import job_pb2
from rara_scheduler.domain.attempt import Refusal, Report, decide
from rara_scheduler.domain.errors import FINAL, Code
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.secrets import find_value
from rara_scheduler.transport.events import PayloadLimits, read_event
from support.lease_facts import LEASED
from support.planted_secrets import SAMPLES

LIMITS = PayloadLimits(1 << 20, 16 << 10)


def event(what: str, value: object) -> job_pb2.ProgressEvent:
    """One that keeps the value. what: effect, progress or cancelled."""
    made = job_pb2.ProgressEvent(sequence=1)
    data = json.dumps(value).encode()
    if what == "effect":
        made.effect.name, made.effect.result.data = "next page", data
    else:
        getattr(made, what).checkpoint.data = data
    return made


def kept_of(report: Report) -> bytes:
    return report.effect[1] if report.effect else report.checkpoint.data if report.checkpoint else b""


@pytest.mark.parametrize("what", ["effect", "progress", "cancelled"])
@pytest.mark.parametrize("allows", [False, True])
def test_a_raw_secret_is_refused_by_its_path_or_kept_as_it_is(what: str, allows: bool) -> None:
    value = {"pages": [1, {"cursor": SAMPLES["jwt"]}]}
    report = read_event(event(what, value), LIMITS)
    assert isinstance(report, Report)
    decision = decide(
        LEASED, [report], RetryPolicy(), known=frozenset(), blobs={}, jitter=0.5, allows_secrets=allows
    )
    if allows:
        assert json.loads(kept_of(decision.stored[0])) == value
        return
    field = "effect.result" if what == "effect" else f"{what}.checkpoint"
    [refusal] = decision.refused
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.code in FINAL) == (Code.SECRET_IN_PAYLOAD, True)
    assert refusal.message.startswith(f"{field}#/pages/1/cursor: holds a raw secret (rule jwt)")
    assert SAMPLES["jwt"] not in refusal.message
    assert not decision.changed


@pytest.mark.parametrize("what", ["effect", "progress", "cancelled"])
def test_what_only_its_key_calls_a_secret_is_kept(what: str) -> None:
    value = {"next_page_token": "b3Blbg", "n": 1.50}
    report = read_event(event(what, value), LIMITS)
    assert isinstance(report, Report)
    assert (report.secret, json.loads(kept_of(report))) == ("", value)


@pytest.mark.parametrize("rule", SAMPLES)
def test_a_value_is_found_wherever_it_stands_and_however_it_is_written(rule: str) -> None:
    for before in (" ", "\n", "\t", '"', "\\", "\x1f"):
        found = find_value(json.dumps([0, {"at": f"x{before}{SAMPLES[rule]}"}]).encode())
        assert found is not None
        assert (found.parts, found.rule) == ((1, "at"), rule)
