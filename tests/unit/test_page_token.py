"""Page tokens go on where a page ended, and only with the filter that they came from."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara.v1 import workflow_pb2
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.transport.page_token import decode_token, encode_token, page_size
from rara_scheduler.transport.paging import ANSWER_BYTES, fit_steps, page

REQUEST = workflow_pb2.ListRunsRequest(definition="d", labels={"b": "2", "a": "1"}, page_size=10)


def test_a_token_gives_its_position_back() -> None:
    token = encode_token(REQUEST, ("2026-01-01T00:00:00+00:00", "id"))
    assert decode_token(REQUEST, token, 2) == ("2026-01-01T00:00:00+00:00", "id")
    assert decode_token(REQUEST, "", 2) is None


def test_the_page_size_may_change_and_the_filter_may_not() -> None:
    token = encode_token(REQUEST, ("x",))
    same = workflow_pb2.ListRunsRequest(
        definition="d", labels={"a": "1", "b": "2"}, page_size=99, page_token="t"
    )
    assert decode_token(same, token, 1) == ("x",)
    for other in (
        workflow_pb2.ListRunsRequest(definition="d"),
        workflow_pb2.ListStepRunsRequest(),
        workflow_pb2.ListRunsRequest(),
    ):
        with pytest.raises(Fault, match="belongs to another filter") as caught:
            decode_token(other, token, 1)
        assert caught.value.code is Code.PAGE_TOKEN_INVALID
        assert caught.value.fields[0].field == "page_token"


@given(
    st.text(max_size=80) | st.binary(max_size=60).map(lambda data: base64.urlsafe_b64encode(data).decode())
)
def test_what_is_no_token_is_refused(token: str) -> None:
    if token:
        with pytest.raises(Fault) as caught:
            decode_token(REQUEST, token, 1)
        assert caught.value.code is Code.PAGE_TOKEN_INVALID


@pytest.mark.parametrize(
    "value", ["{}", "[]", "7", '{"position":["a","b"],"filter":"x"}', '{"position":[1]}', "[" * 900]
)
def test_json_that_is_no_token_is_refused(value: str) -> None:
    with pytest.raises(Fault):
        decode_token(REQUEST, base64.urlsafe_b64encode(value.encode()).decode(), 1)


def test_page_sizes_have_a_default_and_a_cap() -> None:
    assert [page_size(asked) for asked in (0, 1, 50, 1000, 1001, 2**31 - 1)] == [50, 1, 50, 1000, 1000, 1000]
    with pytest.raises(Fault, match="page_size: must not be negative"):
        page_size(-1)


def runs(count: int, size: int) -> list[workflow_pb2.WorkflowRun]:
    return [workflow_pb2.WorkflowRun(workflow_run_id=f"{n}", definition="x" * size) for n in range(count)]


def test_a_page_ends_at_its_size_or_when_it_is_full_but_is_never_empty() -> None:
    def cut(found: list[workflow_pb2.WorkflowRun], size: int) -> tuple[int, bool]:
        made, token = page(REQUEST, found, size, lambda run: run, lambda run: (run.workflow_run_id,))
        if token:
            assert decode_token(REQUEST, token, 1) == (made[-1].workflow_run_id,)
        return len(made), bool(token)

    assert cut(runs(0, 1), 5) == (0, False)
    assert cut(runs(5, 1), 5) == (5, False)
    assert cut(runs(6, 1), 5) == (5, True)
    assert cut(runs(5, ANSWER_BYTES // 2 - 100), 5) == (2, True)
    assert cut(runs(2, ANSWER_BYTES * 2), 5) == (1, True)
    assert cut(runs(1, ANSWER_BYTES * 2), 5) == (1, False)


def test_steps_that_do_not_fit_lose_whole_fields_of_all() -> None:
    def steps(size: int) -> list[workflow_pb2.StepRun]:
        made = [workflow_pb2.StepRun(step_name=f"s{n}", reason="R") for n in range(10)]
        for step in made:
            step.output.data = b"x" * size
            step.manifest.artifacts.add(name="a" * size)
        return made

    small = steps(10)
    fit_steps(small, "manifest", "output")
    assert all(step.HasField("manifest") for step in small)
    large = steps(ANSWER_BYTES // 15)
    fit_steps(large, "manifest", "output")
    assert [(step.HasField("manifest"), step.HasField("output")) for step in large] == [(False, True)] * 10
