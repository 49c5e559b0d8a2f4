"""Bad input of the API: documented status, reason, field and limit; nothing is left behind; a neighbour passes.

What executors can send wrong (protocol version, tokens, gaps, digests) is tested with their services:
test_dispatch_service.py and test_artifact_service.py.
"""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, workflow_pb2
from rara_testing.scripted_executor import WAIT_S
from support.api_errors import refusal
from support.running_scheduler import RunningScheduler, running_scheduler

S = workflow_pb2
LIMIT = 100_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
NOBODY = "0198c2a0-0000-7000-8000-000000000001"
HELLO = hashlib.sha256(b"hello").hexdigest()
Case = tuple[
    Any, grpc.StatusCode, str, list[str], str
]  # request, status, reason, fields, words of the message


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(
        database_url, tmp_path, max_payload_bytes=LIMIT, max_frame_bytes=8 * 1024 * 1024
    ) as opened:
        yield opened


async def is_refused(world: RunningScheduler, method: str, case: Case) -> None:
    request, status, reason, fields, words = case
    call = getattr(world.workflows, method)(request, timeout=WAIT_S)
    if hasattr(call, "__aiter__"):
        call = _all(call)
    refused = await refusal(call)
    assert (refused.status, refused.reason, refused.fields) == (status, reason, fields), refused
    assert words in refused.message, refused
    assert "hunter2-hush" not in f"{refused}"


async def _all(call: Any) -> list[Any]:
    return [answer async for answer in call]


async def nothing_is_left(world: RunningScheduler) -> bool:
    tables = ("definition", "route", "workflow_run", "step_run", "ready", "start_key", "run_artifact")
    counts = [await world.raw.fetchval(f"select count(*) from rara.{table}") for table in tables]
    return not any(counts)


def definition(name: str = "d", *steps: dict[str, Any], **more: Any) -> S.RegisterDefinitionRequest:
    made = S.Definition(
        definition=name,
        steps=[S.StepDefinition(**({"kind": "work.do"} | step)) for step in steps or ({"step_name": "a"},)],
        **more,
    )
    return S.RegisterDefinitionRequest(definition=made)


def template(data: bytes) -> dict[str, Any]:
    return {"step_name": "a", "input_template": common_pb2.Payload(data=data)}


async def test_bad_definitions(world: RunningScheduler) -> None:
    a, b = {"step_name": "a", "depends_on": ["b"]}, {"step_name": "b", "depends_on": ["a"]}
    reason = "DEFINITION_INVALID"
    cases: list[Case] = [
        (definition("d", a, b), INVALID, reason, ["steps[0].depends_on"], "is a cycle: a -> b -> a"),
        (definition("d", a), INVALID, reason, ["steps[0].depends_on[0]"], "names no step of this definition: b"),
        (definition("D"), INVALID, reason, ["definition"], "lower-case"),
        (S.RegisterDefinitionRequest(), INVALID, reason, ["definition", "steps"], "is empty"),
        (definition("d", {"step_name": "a", "kind": ""}), INVALID, reason, ["steps[0].kind"], "is empty"),
        (
            definition("d", template(b'{"x": {"$ref": "/steps/zz/output"}}')),
            INVALID, reason, ["steps[0].input_template#/x/$ref"], "names no step",
        ),
        (
            definition("d", template(b'{"x": {"$ref": "/env/HOME"}}')),
            INVALID, reason, ["steps[0].input_template#/x/$ref"], "must point below /run/input",
        ),
        (definition("d", template(b"{nope")), INVALID, reason, ["steps[0].input_template"], "is not JSON"),
        (
            definition("d", {"step_name": "a", "timeout": Duration(seconds=-1)}),
            INVALID, reason, ["steps[0].timeout"], "must not be negative",
        ),
        (
            definition("d", *({"step_name": f"s{n}"} for n in range(10_001))),
            INVALID, reason, ["steps"], "has 10001 steps, over the limit of 10000",
        ),
        (
            definition("d", template(b'{"db": {"password": "hunter2-hush"}}')),
            INVALID, "SECRET_IN_PAYLOAD", ["steps[0].input_template#/db/password"], "raw secret",
        ),
        (
            definition("d", labels={"api_key": "hunter2-hush"}),
            INVALID, "SECRET_IN_PAYLOAD", ["labels#/api_key"], "raw secret",
        ),
    ]  # fmt: skip
    for case in cases:
        await is_refused(world, "RegisterDefinition", case)
        case[0].validate_only = True
        await is_refused(world, "RegisterDefinition", case)
    assert await nothing_is_left(world)
    neighbours = [
        definition("d-1", {"step_name": "a"}, b),
        definition(
            "d-2", template(b'{"x": {"$ref": "/run/input/deep/0"}, "password": {"$ref": "/run/input/p"}}')
        ),
        definition("d-3", *({"step_name": f"s{n}"} for n in range(10_000))),
        definition("d-4", template(b'{"password": "hunter2-hush"}'), labels={"rara.allow_secrets": "true"}),
    ]
    for request in neighbours:
        answer = await world.workflows.RegisterDefinition(request, timeout=WAIT_S)
        assert answer.definition.version == 1


def start(data: bytes | None = None, **more: Any) -> S.StartRunRequest:
    payload = None if data is None else common_pb2.Payload(data=data)
    return S.StartRunRequest(**({"definition": "d", "input": payload} | more))


async def test_bad_starts(world: RunningScheduler) -> None:
    invalid, field = "PAYLOAD_INVALID", "FIELD_INVALID"
    digest = common_pb2.Digest(sha256=HELLO, size_bytes=5)
    exact = b'"' + b"x" * (LIMIT - 2) + b'"'
    cases: list[Case] = [
        (start(definition="none"), NOT_FOUND, "DEFINITION_NOT_FOUND", [], "there is no definition none"),
        (start(definition_version=9), NOT_FOUND, "DEFINITION_NOT_FOUND", [], "there is no version 9"),
        (start(definition="No Name"), INVALID, field, ["definition"], "lower-case"),
        (start(definition_version=-1), INVALID, field, ["definition_version"], "must not be negative"),
        (start(b"{nope"), INVALID, invalid, ["input"], "is not JSON, from character 1 on"),
        (start(b""), INVALID, invalid, ["input"], "is empty"),
        (start(b'{"a": ["\\u0000"]}'), INVALID, invalid, ["input#/a/0"], "U+0000"),
        (start(b'{"a\\u0000": 1}'), INVALID, invalid, ["input#/a\ufffd"], "U+0000 in a key"),
        (start(b'"\\ud800"'), INVALID, invalid, ["input"], "lone surrogate"),
        (start(b'{"n": NaN}'), INVALID, invalid, ["input"], "NaN is not JSON"),
        (start(b'"\xff"'), INVALID, invalid, ["input"], "not valid UTF-8"),
        (start(b'{"a": 1, "a": 2}'), INVALID, invalid, ["input#/a"], "given twice"),
        (start(b"[" * 500 + b"]" * 500), INVALID, invalid, ["input"], "deeper than 128"),
        (
            start(input=common_pb2.Payload(data=b"x", media_type="text/plain")),
            INVALID, invalid, ["input.media_type"], "application/json",
        ),
        (start(input=common_pb2.Payload(omitted_bytes=5000)), INVALID, invalid, ["input"], "left out of a list"),
        (start(exact + b" "), INVALID, "PAYLOAD_TOO_LARGE", ["input"], f"over the limit of {LIMIT}"),
        (start(b'{"token": "hunter2-hush"}'), INVALID, "SECRET_IN_PAYLOAD", ["input#/token"], "raw secret"),
        (start(labels={"token": "hunter2-hush"}), INVALID, "SECRET_IN_PAYLOAD", ["labels#/token"], "raw secret"),
        (start(labels={"a\x00": "b"}), INVALID, field, ["labels[…]"], "key"),
        (start(labels={"rara.x": "b"}), INVALID, field, ["labels[rara.x]"], "reserved"),
        (start(idempotency_key="k" * 256), INVALID, field, ["idempotency_key"], "at most 255"),
        (start(idempotency_key="a\x00"), INVALID, field, ["idempotency_key"], "control characters"),
        (start(run_timeout=Duration(seconds=-1)), INVALID, field, ["run_timeout"], "must not be negative"),
        (start(run_timeout=Duration()), INVALID, field, ["run_timeout"], "at least 0.001 s"),
        (
            start(input_artifacts=[common_pb2.Artifact(name="x", digest=digest)]),
            NOT_FOUND, "ARTIFACT_NOT_FOUND", [], f"no blob {HELLO} is stored",
        ),
        (
            start(input_artifacts=[common_pb2.Artifact(name="x", digest=digest, inline=b"hellO")]),
            INVALID, "ARTIFACT_MISMATCH", ["input_artifacts[0].digest"], "do not have the digest",
        ),
        (
            start(input_artifacts=[common_pb2.Artifact(name="../x", digest=common_pb2.Digest(sha256="A" * 64))]),
            INVALID, field, ["input_artifacts[0].name", "input_artifacts[0].digest.sha256"], "hexadecimal",
        ),
        (
            start(input_artifacts=[common_pb2.Artifact(name="x", digest=digest, inline=b"hello")] * 2),
            INVALID, field, ["input_artifacts[1].name"], "is given twice",
        ),
        (
            start(
                input_artifacts=[
                    common_pb2.Artifact(
                        name="x", digest=digest, inline=b"hello", metadata=common_pb2.Payload(data=b"{nope")
                    )
                ]
            ),
            INVALID, field, ["input_artifacts[0].metadata"], "is not JSON",
        ),
    ]  # fmt: skip
    await world.define("d", {"a": {}})
    for case in cases:
        await is_refused(world, "StartRun", case)
    for table in ("workflow_run", "step_run", "ready", "start_key", "run_artifact"):
        assert await world.raw.fetchval(f"select count(*) from rara.{table}") == 0
    neighbours = [
        start(),
        start(b"null"),
        start(b'{"a": ["\\u0001"], "n": 1e400, "t": "\\ud83d\\ude00", "token": "", "max_tokens": 5}'),
        start(b"[" * 128 + b"]" * 128),
        start(exact),
        start(definition_version=1, idempotency_key="k" * 255, run_timeout=Duration(nanos=1_000_000)),
        start(labels={"team/x.y": "ü"}),
        start(input_artifacts=[common_pb2.Artifact(name="x", digest=digest, inline=b"hello")]),
    ]
    for request in neighbours:
        answer = await world.workflows.StartRun(request, timeout=WAIT_S)
        assert not answer.already_started
        assert answer.run.input.data == request.input.data


async def test_a_key_with_another_body(world: RunningScheduler) -> None:
    await world.define("d", {"a": {}})
    first = await world.workflows.StartRun(start(b'{"n": 1, "m": 2}', idempotency_key="k"), timeout=WAIT_S)
    refused = await refusal(
        world.workflows.StartRun(start(b'{"n": 2, "m": 2}', idempotency_key="k"), timeout=WAIT_S)
    )
    assert (refused.status, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_CONFLICT")
    assert refused.metadata == {"workflow_run_id": first.run.workflow_run_id}
    again = await world.workflows.StartRun(start(b'{"m":2,"n":1}', idempotency_key="k"), timeout=WAIT_S)
    assert (again.run.workflow_run_id, again.already_started) == (first.run.workflow_run_id, True)


async def test_unknown_and_malformed_ids(world: RunningScheduler) -> None:
    field = "FIELD_INVALID"
    run_calls = {
        "GetRun": S.GetRunRequest, "CancelRun": S.CancelRunRequest, "RetryRun": S.RetryRunRequest,
        "WatchRun": S.WatchRunRequest,
    }  # fmt: skip
    step_calls = {
        "GetStepRun": S.GetStepRunRequest, "ExplainStep": S.ExplainStepRequest, "WatchStepRun": S.WatchStepRunRequest,
    }  # fmt: skip
    for name, calls in (("workflow_run_id", run_calls), ("step_run_id", step_calls)):
        reason = "RUN_NOT_FOUND" if name == "workflow_run_id" else "STEP_NOT_FOUND"
        for method, kind in calls.items():
            made: Any = kind
            cases: list[Case] = [
                (made(**{name: NOBODY}), NOT_FOUND, reason, [], NOBODY),
                (made(**{name: "no-uuid"}), NOT_FOUND, reason, [], "no-uuid"),
                (made(**{name: "\x00\x1b[2J"}), NOT_FOUND, reason, [], "(not an id)"),
                (made(), INVALID, field, [name], "is empty"),
                (made(**{name: "x" * 65}), INVALID, field, [name], "at most 64"),
            ]
            for case in cases:
                await is_refused(world, method, case)
    await is_refused(
        world, "GetDefinition",
        (S.GetDefinitionRequest(definition="none"), NOT_FOUND, "DEFINITION_NOT_FOUND", [], "none"),
    )  # fmt: skip
    await is_refused(
        world, "GetDefinition",
        (S.GetDefinitionRequest(definition="d", version=-1), INVALID, field, ["version"], "negative"),
    )  # fmt: skip
    await is_refused(
        world, "ListStepRuns",
        (S.ListStepRunsRequest(workflow_run_id=NOBODY), NOT_FOUND, "RUN_NOT_FOUND", [], NOBODY),
    )  # fmt: skip
    await world.define("d", {"a": {}})
    run_id = await world.start("d")
    assert (
        await world.workflows.GetRun(S.GetRunRequest(workflow_run_id=run_id.upper()), timeout=WAIT_S)
    ).run.state


async def test_bad_terms_of_other_calls(world: RunningScheduler) -> None:
    await world.define("d", {"a": {}})
    run_id = await world.start("d")
    field = "FIELD_INVALID"
    up = S.LINEAGE_DIRECTION_UPSTREAM
    cases: list[tuple[str, Case]] = [
        (
            "RetryRun",
            (
                S.RetryRunRequest(workflow_run_id=run_id),
                grpc.StatusCode.FAILED_PRECONDITION,
                "RUN_NOT_RETRYABLE",
                [],
                "only a failed or cancelled run",
            ),
        ),
        (
            "CancelRun",
            (
                S.CancelRunRequest(workflow_run_id=run_id, grace=Duration(seconds=-1)),
                INVALID,
                field,
                ["grace"],
                "negative",
            ),
        ),
        (
            "CancelRun",
            (
                S.CancelRunRequest(workflow_run_id=run_id, grace=Duration(seconds=86401)),
                INVALID,
                field,
                ["grace"],
                "at most",
            ),
        ),
        (
            "WatchRun",
            (
                S.WatchRunRequest(workflow_run_id=run_id, after_revision=-1),
                INVALID,
                field,
                ["after_revision"],
                "negative",
            ),
        ),
        (
            "WatchRun",
            (
                S.WatchRunRequest(workflow_run_id=run_id, after_revision=99),
                grpc.StatusCode.OUT_OF_RANGE,
                "REVISION_COMPACTED",
                [],
                "watch from 0",
            ),
        ),
        ("QueryLineage", (S.QueryLineageRequest(direction=up), INVALID, field, ["start"], "must name")),
        (
            "QueryLineage",
            (S.QueryLineageRequest(workflow_run_id=run_id), INVALID, field, ["direction"], "upstream"),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(workflow_run_id=run_id, direction=up, depth=-1),
                INVALID,
                field,
                ["depth"],
                "0 to 32",
            ),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(workflow_run_id=run_id, direction=up, depth=33),
                INVALID,
                field,
                ["depth"],
                "0 to 32",
            ),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(artifact_prefix="0123abc", direction=up),
                INVALID,
                field,
                ["artifact_prefix"],
                "8 to 64 lower-case",
            ),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(artifact_prefix="0123abcd", direction=up),
                NOT_FOUND,
                "ARTIFACT_NOT_FOUND",
                [],
                "begins with 0123abcd",
            ),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(artifact=common_pb2.Digest(sha256="x"), direction=up),
                INVALID,
                field,
                ["artifact.sha256"],
                "64 lower-case",
            ),
        ),
        (
            "QueryLineage",
            (
                S.QueryLineageRequest(step_run_id=NOBODY, direction=up),
                NOT_FOUND,
                "STEP_NOT_FOUND",
                [],
                NOBODY,
            ),
        ),
    ]
    for method, case in cases:
        await is_refused(world, method, case)
    assert await world.run_state(run_id) == "pending"
    for depth in (0, 1, 32):
        lineage = S.QueryLineageRequest(workflow_run_id=run_id, direction=up, depth=depth)
        assert not (await world.workflows.QueryLineage(lineage, timeout=WAIT_S)).edges
    request = S.CancelRunRequest(workflow_run_id=run_id, grace=Duration(seconds=86400), message="m" * 10_000)
    assert (
        await world.workflows.CancelRun(request, timeout=WAIT_S)
    ).run.state == S.WORKFLOW_RUN_STATE_CANCELLED


async def test_bad_pages_and_filters(world: RunningScheduler) -> None:
    field, token = "FIELD_INVALID", "PAGE_TOKEN_INVALID"
    for n in range(3):
        await world.define(f"d-{n}", {"a": {}})
        await world.start(f"d-{n}")
    lists: dict[str, Any] = {
        "ListRuns": S.ListRunsRequest, "ListStepRuns": S.ListStepRunsRequest,
        "ListDefinitions": S.ListDefinitionsRequest, "ListExecutors": S.ListExecutorsRequest,
    }  # fmt: skip
    for method, made in lists.items():
        for bad in ("garbage!", "e30", "A" * 3000):
            await is_refused(
                world, method, (made(page_token=bad), INVALID, token, ["page_token"], "not a token")
            )
        await is_refused(world, method, (made(page_size=-1), INVALID, field, ["page_size"], "negative"))
        await getattr(world.workflows, method)(made(page_size=2**31 - 1), timeout=WAIT_S)
    first = await world.workflows.ListRuns(S.ListRunsRequest(page_size=1), timeout=WAIT_S)
    cases: list[Case] = [
        (
            S.ListRunsRequest(page_size=1, definition="d-1", page_token=first.next_page_token),
            INVALID, token, ["page_token"], "another filter",
        ),
        (S.ListRunsRequest(states=[99]), INVALID, field, ["states[0]"], "is not a state"),  # type: ignore[list-item]  # bad on purpose
        (S.ListRunsRequest(states=[0]), INVALID, field, ["states[0]"], "is not a state"),  # type: ignore[list-item]  # bad on purpose
        (S.ListRunsRequest(definition="Bad Name"), INVALID, field, ["definition"], "lower-case"),
        (S.ListRunsRequest(labels={"a": "x\n"}), INVALID, field, ["labels[a]"], "control characters"),
        (
            S.ListRunsRequest(created_from=Timestamp(seconds=10**15)),
            INVALID, field, ["created_from"], "is not a valid timestamp",
        ),
    ]  # fmt: skip
    for case in cases:
        await is_refused(world, "ListRuns", case)
    bad_kind = S.ListStepRunsRequest(kind="no spaces")
    await is_refused(world, "ListStepRuns", (bad_kind, INVALID, field, ["kind"], "must be 1 to 128"))
    again = await world.workflows.ListRuns(
        S.ListRunsRequest(page_size=5, page_token=first.next_page_token), timeout=WAIT_S
    )
    assert len(again.runs) == 2


async def test_every_hostile_string_is_answered_with_a_status_of_ours(world: RunningScheduler) -> None:
    """No text reaches the database as a surprise: whatever is sent, the answer has a reason, never INTERNAL."""
    await world.define("d", {"a": {}})
    hostile = [
        "\x00",
        "a\x00b",
        "'; drop table rara.definition; --",
        "😀",
        "%s%n",
        "a" * 70_000,
        "../..",
        "\u202e",
        "$1",
    ]
    for text in hostile:
        requests: list[tuple[str, Any]] = [
            ("StartRun", start(definition=text)),
            ("StartRun", start(idempotency_key=text, definition="none")),
            ("StartRun", start(labels={text: text})),
            ("GetRun", S.GetRunRequest(workflow_run_id=text)),
            ("ListRuns", S.ListRunsRequest(definition=text)),
            ("ListRuns", S.ListRunsRequest(page_token=text)),
            ("ListStepRuns", S.ListStepRunsRequest(workflow_run_id=text)),
            ("GetDefinition", S.GetDefinitionRequest(definition=text)),
            ("DrainExecutor", S.DrainExecutorRequest(executor_id=text)),
            ("RetryRun", S.RetryRunRequest(workflow_run_id=NOBODY, idempotency_key=text, step_names=[text])),
            ("RegisterDefinition", definition("e", {"step_name": text, "depends_on": [text]})),
            ("RegisterDefinition", definition("e", labels={text: text})),
            ("RegisterDefinition", definition("e", template(json.dumps({text: {"$ref": text}}).encode()))),
        ]
        for method, request in requests:
            refused = await refusal(getattr(world.workflows, method)(request, timeout=WAIT_S))
            assert refused.status in (INVALID, NOT_FOUND), (method, text, refused)
            assert refused.reason
    assert await world.raw.fetchval("select count(*) from rara.definition") == 1
