"""Definitions: every rule refuses by field path, and its neighbour on the other side passes."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from rara.v1 import common_pb2, workflow_pb2
from rara_scheduler.domain.definition import (
    Binding,
    DefinitionLimits,
    DefinitionSpec,
    SecretName,
    parse_definition,
    stored_definition,
)
from rara_scheduler.domain.definition_content import content_of, content_sha256
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.retry import RetryPolicy

Change = Callable[[workflow_pb2.Definition], object]
DEFAULTS = RetryPolicy(terminal_codes=frozenset({"AUTH_INVALID"}))
LIMITS = DefinitionLimits()


def definition(**changes: object) -> workflow_pb2.Definition:
    """A valid definition of three steps: b depends on a by its template, c on b by an artifact."""
    message = {
        "definition": "nightly-index",
        "steps": [
            {"step_name": "a", "kind": "demo.collect"},
            {"step_name": "b", "kind": "demo.clean"},
            {
                "step_name": "c",
                "kind": "demo.index",
                "input_artifacts": [{"name": "corpus", "from_step": "b", "from_name": "clean"}],
            },
        ],
    }
    made = ParseDict(message | changes, workflow_pb2.Definition())
    if "steps" not in changes:
        made.steps[1].input_template.data = b'{"rows": {"$ref": "/steps/a/output/rows"}}'
    return made


def changed(change: Change) -> workflow_pb2.Definition:
    made = definition()
    change(made)
    return made


def parse(message: workflow_pb2.Definition, limits: DefinitionLimits = LIMITS) -> DefinitionSpec:
    return parse_definition(message, DEFAULTS, limits)


def refusal(message: workflow_pb2.Definition, limits: DefinitionLimits = LIMITS) -> Fault:
    with pytest.raises(Fault) as caught:
        parse(message, limits)
    return caught.value


def set_template(index: int, data: bytes) -> Change:
    def change(message: workflow_pb2.Definition) -> None:
        message.steps[index].input_template.data = data

    return change


def set_duration(name: str, seconds: int, nanos: int = 0, index: int = 0) -> Change:
    def change(message: workflow_pb2.Definition) -> None:
        target: Any = message if name == "run_timeout" else message.steps[index]
        if name in ("initial_backoff", "max_backoff"):
            target = message.steps[index].retry
        getattr(target, name).seconds = seconds
        getattr(target, name).nanos = nanos

    return change


def test_a_definition_becomes_values_in_its_own_order() -> None:
    spec = parse(
        definition(
            run_timeout="3600s",
            on_failure="ON_FAILURE_CONTINUE",
            labels={"team": "search"},
            steps=[
                {
                    "step_name": "z",
                    "kind": "demo.collect",
                    "kind_version": "1.2",
                    "executor_kind": "go",
                    "secrets": {"db": {"provider": "env", "name": "DB_URL"}},
                    "required_labels": {"gpu": "a100"},
                    "retry": {"max_attempts": 5, "initial_backoff": "0.5s", "terminal_codes": ["BAD_DATA"]},
                    "timeout": "60s",
                    "attempt_timeout": "20.5s",
                    "progress_timeout": "5s",
                    "schedule_timeout": "30s",
                    "cancel_grace": "0s",
                },
                {"step_name": "y", "kind": "demo.clean", "depends_on": ["z", "z"]},
            ],
        )
    )
    assert list(spec.steps) == ["z", "y"]
    assert (spec.run_timeout_s, spec.on_failure, spec.labels) == (3600.0, "continue", {"team": "search"})
    z = spec.steps["z"]
    assert (z.executor_kind, z.kind, z.kind_version) == ("go", "demo.collect", "1.2")
    assert z.secrets == {"db": SecretName("env", "DB_URL")}
    assert z.required_labels == {"gpu": "a100"}
    assert z.retry == RetryPolicy(5, 0.5, 300.0, 2.0, frozenset({"BAD_DATA"}))
    assert (z.timeout_s, z.attempt_timeout_s, z.progress_timeout_s) == (60.0, 20.5, 5.0)
    assert (z.schedule_timeout_s, z.cancel_grace_s) == (30.0, 0.0)
    y = spec.steps["y"]
    assert y.depends_on == ("z",)
    assert y.retry is DEFAULTS
    assert (y.timeout_s, y.cancel_grace_s, y.template, y.template_data) == (None, None, None, b"")


def test_templates_and_artifacts_are_dependencies() -> None:
    message = definition()
    message.steps[2].depends_on.append("b")
    spec = parse(message)
    assert spec.steps["b"].depends_on == ("a",)
    assert spec.steps["c"].depends_on == ("b",)
    assert spec.steps["c"].input_artifacts == (Binding("corpus", "b", "clean"),)
    assert spec.dependants("a") == ("b",)
    assert spec.dependants("c") == ()
    assert spec.downstream(["b"]) == {"b", "c"}


def test_an_artifact_without_a_name_at_its_source_keeps_its_own() -> None:
    message = definition()
    message.steps[2].input_artifacts[0].from_name = ""
    assert parse(message).steps["c"].input_artifacts == (Binding("corpus", "b", "corpus"),)


def secret(provider: str, name: str) -> common_pb2.SecretRef:
    return common_pb2.SecretRef(provider=provider, name=name)


BAD: list[tuple[Change, str, str]] = [
    (lambda m: setattr(m, "definition", ""), "definition", "is empty"),
    (lambda m: setattr(m, "definition", "Nightly"), "definition", "must be 1 to 63 lower-case"),
    (lambda m: setattr(m, "definition", "-a"), "definition", "must be 1 to 63 lower-case"),
    (lambda m: setattr(m, "definition", "a" * 64), "definition", "must be 1 to 63 lower-case"),
    (lambda m: setattr(m, "definition", "a\n"), "definition", "must be 1 to 63 lower-case"),
    (lambda m: m.ClearField("steps"), "steps", "must hold at least one step"),
    (lambda m: setattr(m, "on_failure", 9), "on_failure", "is not a value"),
    (lambda m: setattr(m.steps[2], "step_name", ""), "steps[2].step_name", "is empty"),
    (lambda m: setattr(m.steps[2], "step_name", "a/b"), "steps[2].step_name", "must be 1 to 63"),
    (lambda m: setattr(m.steps[2], "step_name", "x" * 64), "steps[2].step_name", "must be 1 to 63"),
    (lambda m: setattr(m.steps[2], "step_name", "a"), "steps[2].step_name", "is given twice: a"),
    (lambda m: setattr(m.steps[1], "kind", ""), "steps[1].kind", "is empty"),
    (lambda m: setattr(m.steps[1], "kind", "no spaces"), "steps[1].kind", "must be 1 to 128"),
    (lambda m: setattr(m.steps[1], "kind_version", "1..2"), "steps[1].kind_version", "must be parts"),
    (lambda m: setattr(m.steps[1], "executor_kind", "Py"), "steps[1].executor_kind", "must be 1 to 63"),
    (
        lambda m: m.steps[2].depends_on.append("zz"),
        "steps[2].depends_on[0]",
        "names no step of this definition: zz",
    ),
    (
        lambda m: m.steps[2].depends_on.append("a b"),
        "steps[2].depends_on[0]",
        "names no step of this definition: (not a name)",
    ),
    (lambda m: m.steps[2].depends_on.extend(["a", "c"]), "steps[2].depends_on[1]", "is the step itself"),
    (lambda m: m.steps[0].depends_on.append("c"), "steps[0].depends_on", "is a cycle: a -> c -> b -> a"),
    (
        lambda m: setattr(m.steps[2].input_artifacts[0], "from_step", "zz"),
        "steps[2].input_artifacts[0].from_step",
        "names no step",
    ),
    (
        lambda m: setattr(m.steps[2].input_artifacts[0], "from_step", "c"),
        "steps[2].input_artifacts[0].from_step",
        "is the step itself",
    ),
    (
        lambda m: setattr(m.steps[2].input_artifacts[0], "name", "../x"),
        "steps[2].input_artifacts[0].name",
        "must be 1 to 255",
    ),
    (
        lambda m: setattr(m.steps[2].input_artifacts[0], "from_name", "a//b"),
        "steps[2].input_artifacts[0].from_name",
        "must be 1 to 255",
    ),
    (
        lambda m: m.steps[2].input_artifacts.add(name="corpus"),
        "steps[2].input_artifacts[1].name",
        "is given twice",
    ),
    (
        set_template(1, b'{"x": {"$ref": "/steps/zz/output"}}'),
        "steps[1].input_template#/x/$ref",
        "names no step of this definition: zz",
    ),
    (
        set_template(1, b'{"x": {"$ref": "/steps/b/output"}}'),
        "steps[1].input_template#/x/$ref",
        "is the step itself",
    ),
    (
        set_template(1, b'{"x": [{"$ref": "steps/a/output"}]}'),
        "steps[1].input_template#/x/0/$ref",
        "must begin with /",
    ),
    (set_template(1, b'{"x": {"$ref": "/env/HOME"}}'), "steps[1].input_template#/x/$ref", "must point below"),
    (set_template(1, b"{nope"), "steps[1].input_template", "is not JSON"),
    (set_template(1, b'{"a":"\\u0000"}'), "steps[1].input_template#/a", "holds U+0000"),
    (
        set_template(1, b'{"a":"' + b"x" * 1024 * 1024 + b'"}'),
        "steps[1].input_template",
        "over the limit of 1048576",
    ),
    (lambda m: m.labels.update({"rara.x": "1"}), "labels[rara.x]", "are reserved"),
    (
        lambda m: m.labels.update({"rara.allow_secrets": "yes"}),
        "labels[rara.allow_secrets]",
        "must be true or false",
    ),
    (lambda m: m.labels.update({"a b": "1"}), "labels[…]", "the key must be"),
    (lambda m: m.labels.update({"a": "x\n"}), "labels[a]", "without control characters"),
    (lambda m: m.labels.update({"a": "x" * 256}), "labels[a]", "at most 255"),
    (lambda m: m.labels.update({f"k{n}": "v" for n in range(65)}), "labels", "has 65 labels"),
    (
        lambda m: m.steps[0].required_labels.update({"": "v"}),
        "steps[0].required_labels[…]",
        "the key is empty",
    ),
    (
        lambda m: m.steps[0].secrets["9"].MergeFrom(secret("env", "X")),
        "steps[0].secrets[…]",
        "must be 1 to 128",
    ),
    (
        lambda m: m.steps[0].secrets["s"].MergeFrom(secret("", "X")),
        "steps[0].secrets[s].provider",
        "is empty",
    ),
    (lambda m: m.steps[0].secrets["s"].MergeFrom(secret("env", "")), "steps[0].secrets[s].name", "is empty"),
    (set_duration("timeout", -1), "steps[0].timeout", "must not be negative"),
    (set_duration("timeout", 0), "steps[0].timeout", "must be at least 0.001 s"),
    (
        set_duration("attempt_timeout", 366 * 86400 + 1),
        "steps[0].attempt_timeout",
        "must be at most 31622400 s",
    ),
    (set_duration("progress_timeout", 1, -1), "steps[0].progress_timeout", "is not a valid duration"),
    (
        set_duration("schedule_timeout", 1, 1_000_000_000),
        "steps[0].schedule_timeout",
        "is not a valid duration",
    ),
    (set_duration("cancel_grace", 86_401), "steps[0].cancel_grace", "must be at most 86400 s"),
    (set_duration("run_timeout", -5), "run_timeout", "must not be negative"),
    (set_duration("initial_backoff", -1), "steps[0].retry.initial_backoff", "must not be negative"),
    (set_duration("max_backoff", 32 * 86400), "steps[0].retry.max_backoff", "must be at most"),
    (
        lambda m: setattr(m.steps[0].retry, "max_attempts", -1),
        "steps[0].retry.max_attempts",
        "must be 1 to 1000",
    ),
    (
        lambda m: setattr(m.steps[0].retry, "max_attempts", 1001),
        "steps[0].retry.max_attempts",
        "must be 1 to 1000",
    ),
    (
        lambda m: setattr(m.steps[0].retry, "backoff_multiplier", 0.5),
        "steps[0].retry.backoff_multiplier",
        "must be 1 to 100",
    ),
    (
        lambda m: setattr(m.steps[0].retry, "backoff_multiplier", float("inf")),
        "steps[0].retry.backoff_multiplier",
        "must be 1 to 100",
    ),
    (
        lambda m: setattr(m.steps[0].retry, "backoff_multiplier", float("nan")),
        "steps[0].retry.backoff_multiplier",
        "must be 1 to 100",
    ),
    (
        lambda m: m.steps[0].retry.terminal_codes.append("bad code"),
        "steps[0].retry.terminal_codes[0]",
        "must be upper snake case",
    ),
]


def test_the_definition_that_all_bad_ones_are_made_from_passes() -> None:
    assert list(parse(definition()).steps) == ["a", "b", "c"]


@pytest.mark.parametrize(("change", "path", "says"), BAD, ids=[f"{path}: {says}" for _, path, says in BAD])
def test_what_is_wrong_is_named_by_its_path(change: Change, path: str, says: str) -> None:
    fault = refusal(changed(change))
    assert fault.code is Code.DEFINITION_INVALID
    assert [violation.field for violation in fault.fields] == [path]
    assert says in fault.fields[0].description
    assert fault.metadata["path"] == path


GOOD: list[Change] = [
    lambda m: setattr(m, "definition", "a" * 63),
    lambda m: setattr(m, "definition", "0-9"),
    lambda m: setattr(m.steps[2], "step_name", "x" * 63),
    lambda m: setattr(m.steps[1], "kind_version", "1.2.0-rc1+build.5"),
    lambda m: m.steps[2].depends_on.extend(["a", "b"]),
    lambda m: m.steps[2].input_artifacts.add(name="raw"),
    lambda m: m.labels.update({"rara.allow_secrets": "false", "team/search.x": "", "k": "v" * 255}),
    lambda m: m.labels.update({f"k{n}": "v" for n in range(64)}),
    set_template(1, b'{"x": {"$ref": "/run/input"}, "y": {"$ref": "/steps/a/output/~0~1/0"}}'),
    set_template(1, b"null"),
    set_template(1, b'"' + b"x" * (1024 * 1024 - 2) + b'"'),
    set_duration("timeout", 366 * 86400),
    set_duration("attempt_timeout", 0, 1_000_000),
    set_duration("cancel_grace", 0),
    set_duration("initial_backoff", 0),
    set_duration("max_backoff", 31 * 86400),
    lambda m: setattr(m.steps[0].retry, "max_attempts", 1000),
    lambda m: setattr(m.steps[0].retry, "backoff_multiplier", 1.0),
    lambda m: m.steps[0].retry.terminal_codes.extend(["AUTH_INVALID", "INTERNAL"]),
]


@pytest.mark.parametrize("change", GOOD)
def test_the_neighbours_of_what_is_wrong_pass(change: Change) -> None:
    parse(changed(change))


def test_a_long_cycle_is_named_and_cut_in_the_middle() -> None:
    message = workflow_pb2.Definition(definition="ring")
    for n in range(1000):
        message.steps.add(step_name=f"s{n}", kind="k", depends_on=[f"s{(n + 1) % 1000}"])
    (violation,) = refusal(message).fields
    assert violation.description == (
        "is a cycle: s0 -> s1 -> s2 -> s3 -> s4 -> s5 -> (989 more) -> s995 -> s996 -> s997 -> s998 -> s999 -> s0"
    )


def test_a_cycle_behind_healthy_steps_is_found() -> None:
    message = workflow_pb2.Definition(definition="tail")
    message.steps.add(step_name="ok", kind="k")
    message.steps.add(step_name="x", kind="k", depends_on=["ok", "y"])
    message.steps.add(step_name="y", kind="k", depends_on=["x"])
    message.steps.add(step_name="behind", kind="k", depends_on=["y"])
    (violation,) = refusal(message).fields
    assert (violation.field, violation.description) == ("steps[1].depends_on", "is a cycle: x -> y -> x")


def test_all_that_is_wrong_is_told_at_once_within_a_bound() -> None:
    message = definition()
    message.definition = "BAD"
    message.steps[0].kind = ""
    message.steps[2].depends_on.append("zz")
    assert [violation.field for violation in refusal(message).fields] == [
        "definition",
        "steps[0].kind",
        "steps[2].depends_on[0]",
    ]
    many = workflow_pb2.Definition(definition="many")
    for n in range(500):
        many.steps.add(step_name=f"s{n}", kind="")
    fault = refusal(many)
    assert len(fault.fields) == 20
    assert "and 495 more" in fault.message
    assert len(fault.message) < 2000


def test_the_number_of_steps_is_bounded_and_exactly_the_limit_passes() -> None:
    message = workflow_pb2.Definition(definition="many")
    for n in range(10):
        message.steps.add(step_name=f"s{n}", kind="k")
    parse(message, DefinitionLimits(max_steps=10))
    (violation,) = refusal(message, DefinitionLimits(max_steps=9)).fields
    assert (violation.field, violation.description) == ("steps", "has 10 steps, over the limit of 9")


def test_the_number_of_dependencies_is_bounded() -> None:
    message = workflow_pb2.Definition(definition="wide")
    for n in range(5):
        message.steps.add(step_name=f"s{n}", kind="k", depends_on=[f"s{m}" for m in range(n)])
    parse(message, DefinitionLimits(max_dependencies=4, max_edges=10))
    assert refusal(message, DefinitionLimits(max_dependencies=3)).fields[0].field == "steps[4].depends_on"
    assert refusal(message, DefinitionLimits(max_edges=9)).fields[0].field == "steps"


SECRETS: list[tuple[Change, str]] = [
    (set_template(1, b'{"db": {"password": "hunter2-hush"}}'), "steps[1].input_template#/db/password"),
    (set_template(1, b'["postgres://app:hunter2-hush@db/app"]'), "steps[1].input_template#/0"),
    (lambda m: m.labels.update({"api_key": "hunter2-hush"}), "labels#/api_key"),
    (
        lambda m: m.steps[0].secrets["s"].MergeFrom(secret("env", "https://u:hunter2-hush@host")),
        "steps[0].secrets[s].name",
    ),
]


@pytest.mark.parametrize(("change", "path"), SECRETS, ids=[path for _, path in SECRETS])
def test_a_raw_secret_is_refused_by_path_and_never_repeated(change: Change, path: str) -> None:
    fault = refusal(changed(change))
    assert fault.code is Code.SECRET_IN_PAYLOAD
    assert [violation.field for violation in fault.fields] == [path]
    assert "rule" in fault.fields[0].description
    assert "hunter2-hush" not in f"{fault.message} {fault.fields} {fault.metadata}"


@pytest.mark.parametrize(("change", "path"), SECRETS, ids=[path for _, path in SECRETS])
def test_a_definition_may_opt_out_of_the_secret_rules(change: Change, path: str) -> None:
    message = changed(change)
    message.labels["rara.allow_secrets"] = "true"
    spec = parse(message)
    assert spec.allows_secrets
    assert spec.labels["rara.allow_secrets"] == "true"
    assert not parse(definition()).allows_secrets


def test_a_secret_beside_other_faults_keeps_its_reason() -> None:
    message = definition(definition="BAD")
    message.steps[1].input_template.data = b'{"token": "x"}'
    fault = refusal(message)
    assert fault.code is Code.DEFINITION_INVALID
    assert [(violation.field, violation.reason) for violation in fault.fields] == [
        ("definition", ""),
        ("steps[1].input_template#/token", Code.SECRET_IN_PAYLOAD),
    ]


def test_a_single_backoff_makes_the_other_give_way() -> None:
    high = parse(changed(set_duration("initial_backoff", 600))).steps["a"].retry
    assert (high.initial_backoff_s, high.max_backoff_s) == (600.0, 600.0)
    low = parse(changed(set_duration("max_backoff", 0, 500_000_000))).steps["a"].retry
    assert (low.initial_backoff_s, low.max_backoff_s) == (0.5, 0.5)
    assert low.terminal_codes == DEFAULTS.terminal_codes

    def contradict(message: workflow_pb2.Definition) -> None:
        set_duration("initial_backoff", 10)(message)
        set_duration("max_backoff", 9)(message)

    assert refusal(changed(contradict)).fields[0].field == "steps[0].retry.max_backoff"


def test_a_stored_definition_is_read_whatever_limits_came_later() -> None:
    message = definition()
    message.steps[1].input_template.data = b'{"password": "taken before the rule"}'
    message.version = 7
    spec = stored_definition(message, DEFAULTS)
    assert (spec.version, list(spec.steps)) == (7, ["a", "b", "c"])
    assert spec.steps["b"].template == {"password": "taken before the rule"}


# ---------------------------------------------------------------- content hash

SAME: list[Change] = [
    lambda m: setattr(m, "version", 9),
    lambda m: setattr(m, "content_sha256", "f" * 64),
    lambda m: setattr(m, "on_failure", workflow_pb2.ON_FAILURE_FAIL_FAST),
    lambda m: setattr(m.steps[2].input_artifacts[0], "from_name", "clean"),
    lambda m: m.steps[0].retry.SetInParent(),
    set_template(1, b'{ "rows" : {"\\u0024ref": "/steps/a/output/rows"} }'),
]
OTHER: list[Change] = [
    lambda m: setattr(m, "on_failure", workflow_pb2.ON_FAILURE_CONTINUE),
    lambda m: m.labels.update({"a": "b"}),
    lambda m: setattr(m.steps[0], "kind_version", "1"),
    lambda m: m.steps[2].depends_on.append("a"),
    lambda m: m.steps[0].retry.terminal_codes.append("X_Y"),
    set_template(0, b"null"),
    set_template(1, b'{"rows": {"$ref": "/steps/a/output/rows"}, "n": 1}'),
    set_duration("cancel_grace", 0),
    set_duration("run_timeout", 60),
]


@pytest.mark.parametrize("change", SAME)
def test_what_makes_no_difference_to_a_run_makes_none_to_the_hash(change: Change) -> None:
    assert content_sha256(changed(change)) == content_sha256(definition())


@pytest.mark.parametrize("change", OTHER)
def test_what_makes_a_difference_changes_the_hash(change: Change) -> None:
    assert content_sha256(changed(change)) != content_sha256(definition())


def test_the_order_of_steps_counts_and_that_of_dependencies_does_not() -> None:
    def of(*steps: tuple[str, list[str]]) -> str:
        message = workflow_pb2.Definition(definition="d")
        for name, ups in steps:
            message.steps.add(step_name=name, kind="k", depends_on=ups)
        return content_sha256(message)

    assert of(("a", []), ("b", []), ("c", ["a", "b"])) == of(("a", []), ("b", []), ("c", ["b", "a", "b"]))
    assert of(("a", []), ("b", [])) != of(("b", []), ("a", []))


def test_numbers_in_templates_are_hashed_as_they_were_spelled() -> None:
    hashes = {content_sha256(changed(set_template(0, data))) for data in (b"1", b"1.0", b"1e0", b"1.00")}
    assert len(hashes) == 4


def test_content_leaves_out_what_the_scheduler_gives() -> None:
    message = definition(version=3, content_sha256="f" * 64, created_at="2026-01-01T00:00:00Z")
    content = content_of(message)
    assert not content.version
    assert not content.content_sha256
    assert not content.HasField("created_at")
    assert message.version == 3


def test_ten_thousand_steps_are_parsed_and_hashed_fast() -> None:
    message = workflow_pb2.Definition(definition="big")
    for n in range(10_000):
        step = message.steps.add(step_name=f"s{n}", kind="k", kind_version="1")
        if n:
            step.depends_on.append(f"s{n - 1}")
            step.input_template.data = b'{"up": {"$ref": "/steps/s%d/output"}}' % (n - 1)
    began = time.thread_time()
    spec = parse(message)
    content_sha256(message)
    assert time.thread_time() - began < 5  # 0.6 s of computing; the bound catches what is not linear
    assert len(spec.downstream(["s5000"])) == 5000
