"""Raw secrets are found by key and by prefix; digests, ids and references are not secrets."""

import hashlib
import json
import time

import pytest
from rara_scheduler.domain.secrets import (
    VALUE_RULES,
    Finding,
    find_secret,
    names_a_secret,
    redact_json,
    redact_text,
    value_rule,
)
from support.planted_secrets import SAMPLES

CLEAN = [
    hashlib.sha256(b"x").hexdigest(),
    "0190b5c2-7f3e-7a51-9d24-3c1f0e8a6b47",
    "sha256:" + hashlib.sha256(b"y").hexdigest(),
    "https://example.org/a@b?c=d:e",
    "https://user@example.org/",
    "postgres://db.internal:5432/app",
    "postgres://app:***@db",
    "postgres://app:${PASSWORD}@db",
    "sk-learn-compatible-estimators-and-pipelines",
    "task-0123456789012345678901234567890123456789",
    "eyJhbGciOiJIUzI1 is how a token begins",
    "-----BEGIN PUBLIC KEY-----",
    "-----BEGIN CERTIFICATE-----",
    "the password is not here",
    "a@b.example: http://x y:z@w",
]


def test_each_rule_has_a_sample() -> None:
    assert set(SAMPLES) == {rule for rule, _ in VALUE_RULES}


@pytest.mark.parametrize("rule", SAMPLES)
def test_a_raw_secret_is_found_where_it_stands(rule: str) -> None:
    sample = SAMPLES[rule]
    assert value_rule(sample) == rule
    assert value_rule(f"see {sample}, thanks") == rule
    document = {"a": [0, {"b": f"x {sample}"}]}
    assert find_secret(json.dumps(document).encode()) == Finding(("a", 1, "b"), rule)
    assert find_secret({"a": {sample: 1}}) == Finding(("a",), rule)


@pytest.mark.parametrize("rule", SAMPLES)
def test_an_escaped_spelling_does_not_hide_a_secret(rule: str) -> None:
    sample = SAMPLES[rule]
    hidden = '{"a":"' + "".join(f"\\u{ord(character):04x}" for character in sample) + '"}'
    assert find_secret(hidden.encode()) == Finding(("a",), rule)
    slashed = json.dumps({"a": sample}).replace("/", "\\/")
    assert find_secret(slashed.encode()) == Finding(("a",), rule)


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_long_or_odd_is_clean(text: str) -> None:
    assert value_rule(text) is None
    assert find_secret({"value": text, text: [text]}) is None
    if "@db" not in text or "://db" in text:  # a placeholder for a password may be redacted all the same
        assert redact_text(text) == text


@pytest.mark.parametrize(
    "key",
    [
        "password", "db_password", "DB_PASSWORD", "dbPassword", "db-password", "client_secret", "token",
        "accessToken", "api_key", "apiKey", "API-KEY", "apikey", "private_key", "sshPrivateKey", "Authorization",
        "aws_credential", "SENTRY_DSN", "proxy.authorization",
    ],
)  # fmt: skip
def test_a_key_whose_last_word_names_a_secret(key: str) -> None:
    assert names_a_secret(key)
    assert find_secret({"x": {key: "anything"}}) == Finding(("x", key), "secret_key")
    assert find_secret({key: ""}) is None
    assert find_secret({key: 7, "other": None}) is None
    assert find_secret({key: {"$ref": "/run/input/it"}}) is None


@pytest.mark.parametrize(
    "key",
    ["passwords_file", "token_count", "max_tokens", "tokenizer", "key", "primary_key", "secretary", "public_key",
     "api", "credentials_path", "tokenize"],
)  # fmt: skip
def test_a_key_that_only_mentions_a_secret(key: str) -> None:
    assert not names_a_secret(key)
    assert find_secret({key: "anything"}) is None


def test_a_finding_never_holds_the_value() -> None:
    found = find_secret({"url": SAMPLES["url_with_password"]})
    assert found is not None
    assert "s3cr3t" not in repr(found)


@pytest.mark.parametrize("rule", SAMPLES)
def test_redaction_removes_the_secret_and_keeps_the_rest(rule: str) -> None:
    sample = SAMPLES[rule]
    redacted = redact_text(f"before {sample} after")
    assert sample not in redacted
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")
    assert value_rule(redacted) is None


def test_of_a_url_only_the_password_goes() -> None:
    assert redact_text(f"cannot reach {SAMPLES['url_with_password']}: refused") == (
        "cannot reach postgres://app:[redacted]@db.internal:5432/app: refused"
    )


def test_a_key_that_has_no_end_is_redacted_to_the_end() -> None:
    cut = SAMPLES["private_key"][:40]
    assert redact_text(f"x {cut}") == "x [redacted private_key]"


@pytest.mark.parametrize("before", ["\n", "\t", "\x1f", '"', "\\"])
def test_an_escape_before_it_does_not_hide_a_secret(before: str) -> None:
    data = json.dumps({"log": f"line{before}{SAMPLES['aws_access_key']}", "n": 1.50}).encode()
    assert find_secret(data) == Finding(("log",), "aws_access_key")
    assert json.loads(redact_json(data)) == {"log": f"line{before}[redacted aws_access_key]", "n": 1.5}


def test_many_strings_are_redacted_as_each_alone() -> None:
    texts = [f"{number} {sample}" for number in range(40) for sample in (*SAMPLES.values(), *CLEAN)]
    assert json.loads(redact_json(json.dumps(texts).encode())) == [redact_text(text) for text in texts]


@pytest.mark.parametrize("rule", SAMPLES)
def test_json_stays_json_when_redacted(rule: str) -> None:
    data = json.dumps({"n": 1.50, "list": [SAMPLES[rule], "kept"], "big": 2**70}).encode()
    redacted = redact_json(data)
    value = json.loads(redacted)
    assert value["list"][1] == "kept"
    assert value["big"] == 2**70
    assert find_secret(redacted) is None
    assert redact_json(redacted) == redacted


def test_clean_json_is_left_byte_for_byte() -> None:
    data = b'{ "a" : 1.10, "b":"\\u00e9" }'
    assert redact_json(data) is data


def test_a_megabyte_is_checked_fast() -> None:
    rows = [
        {
            "id": "0190b5c2-7f3e-7a51-9d24-3c1f0e8a6b47",
            "sha256": hashlib.sha256(str(n).encode()).hexdigest(),
            "n": n,
        }
        for n in range(7500)
    ]
    data = json.dumps({"rows": rows}, separators=(",", ":")).encode()
    assert 0.9e6 < len(data) < 1.1e6
    best = min(_timed(data) for _ in range(5))
    assert best < 0.1  # 10 ms on two shared cores; the bound only catches a scan that is not linear


def _timed(data: bytes) -> float:
    began = time.perf_counter()
    assert find_secret(data) is None
    return time.perf_counter() - began
