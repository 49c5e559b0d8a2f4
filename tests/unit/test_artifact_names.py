"""Names of artifacts: one rule, in the scheduler and in both SDKs, that leaves nothing for a file system to mistake.

The Go SDK is tried with the same names, in internal/engine/artifact_rules_test.go.
"""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara.v1 import common_pb2, job_pb2, workflow_pb2
from rara_client.names import is_artifact_name
from rara_executor import artifact_rules
from rara_executor.artifact_rules import ArtifactInvalid
from rara_scheduler.domain import names
from rara_scheduler.domain.attempt import Refusal, Report
from rara_scheduler.domain.definition import DefinitionLimits, parse_definition
from rara_scheduler.domain.errors import Fault
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.transport.convert_requests import start_command
from rara_scheduler.transport.events import MAX_ARTIFACTS, PayloadLimits, read_event
from support.artifact_service import digest_of

NAMES = json.loads(
    (Path(__file__).parents[1] / "support" / "artifact_names.json").read_text(encoding="utf-8")
)
DEFAULTS = RetryPolicy(max_attempts=3)
LIMITS = PayloadLimits(max_payload_bytes=1 << 20, max_inline_bytes=1 << 14, max_attempt_bytes=1000)


def refused_fields(check: Callable[[], object]) -> list[str]:
    with pytest.raises(Fault) as refused:
        check()
    assert refused.value.message.isprintable()
    return [violation.field for violation in refused.value.fields]


def is_taken_by_sdk(name: str) -> bool:
    try:
        artifact_rules.check(name, "blob", "text/plain")
    except ArtifactInvalid:
        return False
    return True


@pytest.mark.parametrize("name", NAMES["good"], ids=range(len(NAMES["good"])))
def test_a_name_that_can_be_a_file_everywhere_is_taken(name: str) -> None:
    assert names.ARTIFACT.refuses(name) is None
    assert is_taken_by_sdk(name)


@pytest.mark.parametrize("name", NAMES["bad"], ids=range(len(NAMES["bad"])))
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    said = names.ARTIFACT.refuses(name)
    assert said is not None
    assert said.isprintable()
    with pytest.raises(ArtifactInvalid) as refused:
        artifact_rules.check(name, "blob", "text/plain")
    assert refused.value.code == "ARTIFACT_INVALID"
    assert refused.value.retryable is False
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()


@given(st.one_of(st.text(max_size=40), st.text("ab./\\-_%= \0\u202e\u0301", max_size=12)))
def test_both_sides_take_the_same_names_and_all_of_them_stay_below_their_folder(name: str) -> None:
    is_taken = names.ARTIFACT.refuses(name) is None
    assert is_taken_by_sdk(name) == is_taken
    assert is_artifact_name(name) == is_taken
    if is_taken:
        for path in (PurePosixPath("/x/y"), PureWindowsPath("c:/x/y")):
            joined = path / name
            assert joined.is_relative_to(path)
            assert ".." not in joined.parts
            assert len(joined.parts) == len(path.parts) + name.count("/") + 1
        assert unicodedata.normalize("NFKD", name) == name


IN_A_MESSAGE = [name for name in NAMES["bad"] if name != "\ud800"]


@pytest.mark.parametrize("name", IN_A_MESSAGE, ids=range(len(IN_A_MESSAGE)))
def test_definitions_and_runs_refuse_it_and_name_the_field(name: str) -> None:
    definition = workflow_pb2.Definition(definition="d")
    step = definition.steps.add(step_name="a", kind="k")
    step.input_artifacts.add(name=name)
    fields = refused_fields(lambda: parse_definition(definition, DEFAULTS, DefinitionLimits()))
    assert "steps[0].input_artifacts[0].name" in fields

    request = workflow_pb2.StartRunRequest(definition="d", input_artifacts=[artifact(name)])
    fields = refused_fields(lambda: start_command(request, max_payload_bytes=1 << 20))
    assert "input_artifacts[0].name" in fields


def manifest_event(*artifacts: common_pb2.Artifact) -> job_pb2.ProgressEvent:
    manifest = common_pb2.ArtifactManifest(artifacts=artifacts)
    return job_pb2.ProgressEvent(sequence=3, succeeded=job_pb2.JobResult(manifest=manifest))


def artifact(name: str, size_bytes: int = 1, *, type_: str = "", media_type: str = "") -> common_pb2.Artifact:
    digest = common_pb2.Digest(sha256="a" * 64, size_bytes=size_bytes)
    return common_pb2.Artifact(name=name, digest=digest, type=type_, media_type=media_type)


@pytest.mark.parametrize("name", IN_A_MESSAGE, ids=range(len(IN_A_MESSAGE)))
def test_a_manifest_with_such_a_name_is_refused_and_the_field_named(name: str) -> None:
    refusal = read_event(manifest_event(artifact("fine"), artifact(name)), LIMITS)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "FIELD_INVALID"
    assert refusal.message.startswith("manifest.artifacts[1].name: ")
    assert refusal.message.isprintable()


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (artifact("a", type_="Not A Type"), "type"),
        (artifact("a", type_="embedding"), "type"),
        (artifact("a", media_type="none"), "media_type"),
        (artifact("a", media_type="text/" + "x" * 128), "media_type"),
    ],
)
def test_types_have_rules_too(made: common_pb2.Artifact, field: str) -> None:
    refusal = read_event(manifest_event(made), LIMITS)
    assert isinstance(refusal, Refusal)
    assert refusal.message.startswith(f"manifest.artifacts[0].{field}: ")


def test_a_manifest_has_so_many_artifacts() -> None:
    exact = [artifact(f"a{number}") for number in range(MAX_ARTIFACTS)]
    assert isinstance(read_event(manifest_event(*exact), LIMITS), Report)
    refusal = read_event(manifest_event(*exact, artifact("one-more")), LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.message) == (
        "FIELD_INVALID", "manifest.artifacts: there are 1001, and at most 1000 are taken",
    )  # fmt: skip


def test_a_manifest_has_so_many_bytes() -> None:
    assert isinstance(read_event(manifest_event(artifact("a", 400), artifact("b", 600)), LIMITS), Report)
    refusal = read_event(manifest_event(artifact("a", 400), artifact("b", 601)), LIMITS)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "ARTIFACT_TOO_LARGE"


def test_lists_of_digests_are_bounded() -> None:
    digest = digest_of(b"x")
    for size, taken in ((2000, Report), (2001, Refusal)):
        result = job_pb2.JobResult(consumed=[digest] * size)
        event = job_pb2.ProgressEvent(sequence=3, succeeded=result)
        assert isinstance(read_event(event, LIMITS), taken)
        made = artifact("a")
        made.derived_from.extend([digest] * size)
        assert isinstance(read_event(manifest_event(made), LIMITS), taken)


def test_a_run_has_so_many_input_artifacts() -> None:
    exact = [artifact(f"a{number}") for number in range(256)]
    request = workflow_pb2.StartRunRequest(definition="d", input_artifacts=exact)
    assert len(start_command(request, max_payload_bytes=1 << 20).artifacts) == 256
    request.input_artifacts.append(artifact("one-more"))
    assert refused_fields(lambda: start_command(request, max_payload_bytes=1 << 20)) == ["input_artifacts"]


def test_a_manifest_names_so_many_origins() -> None:
    def made(number: int, origins: int) -> common_pb2.Artifact:
        of = artifact(f"a{number}")
        of.derived_from.extend(digest_of(f"{number % 2}-{each}".encode()) for each in range(origins))
        return of

    exact = [made(number, 2000) for number in range(8)]
    report = read_event(manifest_event(*exact), LIMITS)
    assert isinstance(report, Report)
    assert report.outcome is not None
    # Each of them was used, whether or not `consumed` says so.
    assert len(report.outcome.consumed) == len(set(report.outcome.consumed)) == 4000
    refusal = read_event(manifest_event(*exact, made(8, 1)), LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.message) == (
        "FIELD_INVALID",
        "manifest.artifacts: they name 16001 digests in derived_from, and at most 16000 are taken",
    )
