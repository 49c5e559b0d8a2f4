"""Definition files: every field, and every way a file can be wrong."""

import json
from pathlib import Path

import pytest
from rara.v1 import workflow_pb2
from rara_client import DefinitionInvalid
from rara_client.definitions import definition_from, load_definition

EXAMPLE = """
definition: nightly
on_failure: continue
run_timeout: 3600s
labels: {team: data, on: yes, day: 2024-01-01}
steps:
  - &first
    step_name: ingest
    kind: ingest.load
    kind_version: "1.2"
    executor_kind: python
    retry: {max_attempts: 5, initial_backoff: 0.5s, max_backoff: 60s, backoff_multiplier: 2, terminal_codes: [BAD]}
    input_template: {source: {$ref: /run/input/source}}
    secrets: {store: {provider: env, name: STORE_KEY, version: "3"}}
    required_labels: {gpu: a100}
    timeout: 600s
    attempt_timeout: 1.25s
    progress_timeout: 30s
    schedule_timeout: 30s
    cancel_grace: 5s
  - <<: *first
    step_name: index
    depends_on: [ingest]
    input_artifacts: [{name: corpus, from_step: ingest, from_name: text}]
"""


def written(tmp_path: Path, text: str | bytes, name: str = "d.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_with_every_field_becomes_the_message(tmp_path: Path) -> None:
    definition = load_definition(written(tmp_path, EXAMPLE))
    assert definition.definition == "nightly"
    assert definition.on_failure == workflow_pb2.ON_FAILURE_CONTINUE
    assert definition.run_timeout.seconds == 3600
    assert dict(definition.labels) == {"team": "data", "on": "yes", "day": "2024-01-01"}
    ingest, index = definition.steps
    assert (ingest.step_name, ingest.kind, ingest.kind_version, ingest.executor_kind) == (
        "ingest",
        "ingest.load",
        "1.2",
        "python",
    )
    assert ingest.retry.max_attempts == 5
    assert ingest.retry.initial_backoff.nanos == 500_000_000
    assert ingest.retry.backoff_multiplier == 2.0
    assert list(ingest.retry.terminal_codes) == ["BAD"]
    assert ingest.secrets["store"].version == "3"
    assert ingest.attempt_timeout.ToJsonString() == "1.250s"
    assert json.loads(ingest.input_template.data) == {"source": {"$ref": "/run/input/source"}}
    assert index.step_name == "index"
    assert index.kind == "ingest.load"
    assert list(index.depends_on) == ["ingest"]
    assert index.input_artifacts[0].from_name == "text"


def test_yaml_and_json_give_the_same(tmp_path: Path) -> None:
    value = {
        "definition": "x",
        "run_timeout": "5s",
        "steps": [{"step_name": "a", "kind": "b.c", "input_template": {"n": 1.5, "z": None, "u": "ü"}}],
    }
    text = json.dumps(value)
    assert load_definition(written(tmp_path, text)) == load_definition(written(tmp_path, text, "d.json"))
    assert definition_from(value) == load_definition(written(tmp_path, text))


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("9007199254740993", 9007199254740993),
        ("-0", 0),
        ("0x1f", 31),
        ("1e5", 100000.0),
        (".5", 0.5),
        ("1.0", 1.0),
        ("~", None),
        ("", None),
        ("null", None),
        ("=", "="),
        ("'01'", "01"),
    ],
)
def test_a_yaml_value_is_what_it_looks_like(tmp_path: Path, scalar: str, value: object) -> None:
    path = written(tmp_path, f"steps:\n- input_template:\n    x: {scalar}\n")
    template = json.loads(load_definition(path).steps[0].input_template.data)
    assert template == {"x": value}
    assert type(template["x"]) is type(value)


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("definition: 5", "definition", "must be text, not 5: put it in quotes"),
        ("definition: [a]", "definition", "must be text, not a list"),
        ("definition:", "definition", "is empty"),
        ("definitoin: x", "definitoin", "there is no such field; known: definition, labels, on_failure"),
        ("version: 3", "version", "is given by the scheduler"),
        ("content_sha256: x", "content_sha256", "is given by the scheduler"),
        ("steps: {a: 1}", "steps", "must be a list, not an object"),
        ("steps: [a]", "steps[0]", "must be an object, not text"),
        ("steps: [{kind_version: 1.10}]", "steps[0].kind_version", "must be text, not 1.1: put it in quotes"),
        ("steps: [{}, {timeout: 30}]", "steps[1].timeout", 'must be seconds in quotes, such as "30s"'),
        ("run_timeout: 5m", "run_timeout", "must be seconds in quotes"),
        ("run_timeout: -5s", "run_timeout", "must be seconds in quotes"),
        ("on_failure: never", "on_failure", "must be one of fail_fast, continue, not 'never'"),
        ("labels: [a]", "labels", "must be an object, not a list"),
        ("labels: {a: 1}", "labels.a", "must be text, not 1"),
        ("steps: [{depends_on: a}]", "steps[0].depends_on", "must be a list, not text"),
        ("steps: [{depends_on: [a, 1]}]", "steps[0].depends_on[1]", "must be text"),
        ("steps: [{retry: {max_attempts: 1.5}}]", "steps[0].retry.max_attempts", "must be a whole number"),
        ("steps: [{retry: {max_attempts: true}}]", "steps[0].retry.max_attempts", "not true"),
        ("steps: [{retry: {max_attempts: 2147483648}}]", "steps[0].retry.max_attempts", "of 32 bits"),
        (
            "steps: [{retry: {backoff_multiplier: x}}]",
            "steps[0].retry.backoff_multiplier",
            "must be a number",
        ),
        ("steps: [{secrets: {k: {vlaue: x}}}]", "steps[0].secrets.k.vlaue", "known: name, provider, version"),
    ],
)
def test_a_wrong_field_is_named_with_its_path_and_file(
    tmp_path: Path, text: str, field: str, problem: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DefinitionInvalid) as caught:
        load_definition(path)
    assert caught.value.violations[0].field == field
    assert problem in caught.value.violations[0].description
    assert caught.value.message.startswith(f"{path}: {field}: ")
    assert caught.value.reason == "DEFINITION_INVALID"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "line "),
        ("definition: a\ndefinition: b", "line 2, column 1: the key 'definition' stands twice"),
        ("steps: [{input_template: {a: 1, a: 2}}]", "the key 'a' stands twice"),
        ("1: x", "the key '1' is not text"),
        ("true: x", "the key 'true' is not text"),
        (
            "x: !!python/object:os.system 1",
            "the tag tag:yaml.org,2002:python/object:os.system is not allowed",
        ),
        ("x: !!binary aGk=", "is not allowed"),
        ("steps: [{input_template: .nan}]", ".nan cannot be said in JSON"),
        ("steps: [{input_template: -.inf}]", "-.inf cannot be said in JSON"),
        ("steps: [{input_template: 1e999}]", "larger than any number"),
        ("steps: [{input_template: 0755}]", "0755: put it in quotes if it is text"),
        ("a: &x [*x]", "an alias that holds itself"),
        ("a: *x", "undefined alias"),
        ("", "the file is empty"),
        ("# nothing", "the file is empty"),
        ("- 1", "must be an object with fields, not a list"),
        ("just text", "must be an object with fields, not text"),
        ("a: 1\n---\nb: 2", "another document"),
        (b"a: \xff", "can't decode byte 0xff"),
        ("a: \x00", "control characters are not allowed"),
        ("[" * 100_000, "nest"),
        (
            "a: "
            "&a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
            ),
            "aliases counted as often as they stand",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_yaml_file_that_is_not_plain_data_is_refused(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    with pytest.raises(DefinitionInvalid) as caught:
        load_definition(written(tmp_path, text))
    assert problem in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"definition": "a", "definition": "b"}', "the key 'definition' stands twice"),
        ('{"steps": [{"input_template": NaN}]}', "NaN is not JSON"),
        ('{"steps": [{"input_template": 1e999}]}', "is not a JSON value"),
        ('{"steps": [{"input_template": "\\ud800"}]}', "surrogates not allowed"),
        ('{"definition": "\\ud800"}', "half a character"),
        ("{", "line 1, column 2"),
        ("[" * 100_000, "nested too deeply"),
        ('{"labels": {"a": ' + "1" * 5000 + "}}", "more than 4,300 digits"),
        ('{"run_timeout": null}', "is empty"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_json_file_that_is_not_plain_data_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DefinitionInvalid) as caught:
        load_definition(written(tmp_path, text, "d.json"))
    assert problem in caught.value.message


def test_all_faults_are_listed_and_the_message_counts_them(tmp_path: Path) -> None:
    path = written(tmp_path, "definition: 5\nrun_timeout: 5\nsteps: [{kind: 7}]")
    with pytest.raises(DefinitionInvalid) as caught:
        load_definition(path)
    assert [item.field for item in caught.value.violations] == ["definition", "run_timeout", "steps[0].kind"]
    assert caught.value.message.endswith("(and 2 more)")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    assert load_definition(written(tmp_path, b"\xef\xbb\xbfdefinition: x")).definition == "x"


def test_a_large_definition_is_read_within_seconds(tmp_path: Path) -> None:
    steps = "".join(
        f"- {{step_name: s{number}, kind: a.b, input_template: {{x: {number}, y: {{$ref: /run/input/x}}}}}}\n"
        for number in range(10_000)
    )
    assert len(load_definition(written(tmp_path, f"definition: x\nsteps:\n{steps}")).steps) == 10_000
