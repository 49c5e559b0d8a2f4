"""Every code has its gRPC status, as the contract lists them, and a fault carries what a program needs."""

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from rara_scheduler.domain.errors import Code, Fault, FieldViolation
from rara_scheduler.transport.status import STATUS, status_of

S = grpc.StatusCode
# Column A of the contract's table, and the reasons of the API alone.
CONTRACT = {
    S.INVALID_ARGUMENT: [
        "ARTIFACT_MISMATCH", "PAYLOAD_INVALID", "PAYLOAD_TOO_LARGE", "FIELD_INVALID", "DEFINITION_INVALID",
        "SECRET_IN_PAYLOAD", "PAGE_TOKEN_INVALID",
    ],
    S.NOT_FOUND: [
        "DEFINITION_NOT_FOUND", "RUN_NOT_FOUND", "STEP_NOT_FOUND", "EXECUTOR_NOT_FOUND", "ARTIFACT_NOT_FOUND",
        "UPLOAD_NOT_FOUND", "LEASE_UNKNOWN", "KIND_NOT_FOUND",
    ],
    S.ALREADY_EXISTS: ["IDEMPOTENCY_CONFLICT"],
    S.FAILED_PRECONDITION: [
        "LEASE_LOST", "BLOBS_MISSING", "RUN_NOT_RETRYABLE", "PROTOCOL_VERSION_UNSUPPORTED",
    ],
    S.OUT_OF_RANGE: ["REVISION_COMPACTED"],
    S.RESOURCE_EXHAUSTED: ["RATE_LIMITED", "NO_CAPACITY", "QUEUE_FULL"],
    S.UNAVAILABLE: ["EXECUTOR_SHUTDOWN", "STORE_UNAVAILABLE", "POOL_TIMEOUT", "SHUTTING_DOWN"],
    S.UNAUTHENTICATED: ["CREDENTIAL_INVALID"],
    S.PERMISSION_DENIED: ["NOT_ALLOWED"],
    S.UNIMPLEMENTED: ["UNSUPPORTED_KIND", "FEATURE_DISABLED"],
    S.INTERNAL: ["INTERNAL"],
}  # fmt: skip


def details(status: Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                found[kind.__name__] = message
    return found


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_status_and_always_error_info(code: Code) -> None:
    status = status_of(Fault(code, "what happened", metadata={"workflow_run_id": "r"}))
    assert status.code == STATUS[code].value[0]
    assert status.code != 0
    assert status.message == "what happened"
    info = details(status)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        code.value,
        "rara.v1",
        {"workflow_run_id": "r"},
    )
    assert set(details(status)) == {"ErrorInfo"}


@pytest.mark.parametrize(("status", "codes"), CONTRACT.items(), ids=[each.name for each in CONTRACT])
def test_the_codes_of_calls_have_the_status_that_the_contract_lists(
    status: grpc.StatusCode, codes: list[str]
) -> None:
    assert {code: STATUS[Code(code)] for code in codes} == dict.fromkeys(codes, status)


def test_fields_become_a_bad_request_with_the_reason_of_each() -> None:
    fault = Fault(
        Code.DEFINITION_INVALID,
        "two fields",
        fields=(
            FieldViolation("steps[0].kind", "is empty"),
            FieldViolation("steps[1].input_template#/a", "holds a raw secret", "SECRET_IN_PAYLOAD"),
        ),
    )
    bad = details(status_of(fault))["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [(each.field, each.description, each.reason) for each in bad.field_violations] == [
        ("steps[0].kind", "is empty", "DEFINITION_INVALID"),
        ("steps[1].input_template#/a", "holds a raw secret", "SECRET_IN_PAYLOAD"),
    ]


def test_where_waiting_helps_the_status_says_how_long() -> None:
    retry = details(status_of(Fault(Code.QUEUE_FULL, "full", retry_after_s=1.5)))["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_a_status_stays_small_enough_for_the_trailers() -> None:
    fields = tuple(FieldViolation("f" * 5000, "d\x00" * 5000) for _ in range(20))
    status = status_of(Fault(Code.FIELD_INVALID, "m" * 100_000, fields=fields, metadata={"path": "p" * 9000}))
    assert status.ByteSize() < 6000
    bad = details(status)["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert 1 <= len(bad.field_violations) < 20
    assert "\x00" not in bad.field_violations[0].description
