"""Settings that cannot work together are refused at start, by both names."""

import pytest
from pydantic import ValidationError
from rara_scheduler.settings import MIB, Settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"RARA_{name.upper()}", raising=False)
    monkeypatch.setenv("RARA_DATABASE_URL", "postgresql:///rara")


def settings(**values: object) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]  # deliberately any values


def test_the_defaults_work_together() -> None:
    made = settings()
    assert (made.lease_s, made.heartbeat_s, made.silence_s) == (30, 5, 15)
    assert made.reclaim_settle_s == 15


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RARA_LEASE_S", "60")
    monkeypatch.setenv("RARA_LISTEN", "127.0.0.2:0")
    made = settings()
    assert (made.lease_s, made.listen, made.reclaim_settle_s) == (60, "127.0.0.2:0", 30)
    assert settings(settle_s=0).reclaim_settle_s == 0


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"heartbeat_s": 10.1, "silence_s": 29}, ["RARA_HEARTBEAT_S", "RARA_LEASE_S"]),
        ({"silence_s": 12.4}, ["RARA_SILENCE_S", "RARA_HEARTBEAT_S"]),
        ({"silence_s": 30}, ["RARA_SILENCE_S", "RARA_LEASE_S"]),
        ({"max_payload_bytes": 2 * MIB}, ["RARA_MAX_FRAME_BYTES", "RARA_MAX_PAYLOAD_BYTES"]),
        ({"retry_max_backoff_s": 0.5}, ["RARA_RETRY_MAX_BACKOFF_S", "RARA_RETRY_INITIAL_BACKOFF_S"]),
        ({"blob_store": "gs://bucket"}, ["RARA_BLOB_STORE"]),
        ({"blob_store": "s3://"}, ["RARA_BLOB_STORE"]),
        ({"blob_store": "s3://bucket/a//b"}, ["RARA_BLOB_STORE"]),
        ({"blob_store": "s3://bucket/../b"}, ["RARA_BLOB_STORE"]),
        ({"blob_store": "s3://bucket/a?region=b"}, ["RARA_BLOB_STORE"]),
        ({"blob_store": "file://relative"}, ["RARA_BLOB_STORE"]),
        ({"listen": "7310"}, ["RARA_LISTEN"]),
        ({"listen": "127.0.0.1:seven"}, ["RARA_LISTEN"]),
        ({"listen": "127.0.0.1:65536"}, ["RARA_LISTEN"]),
    ],
)
def test_a_contradiction_is_refused_naming_both(values: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ValidationError) as raised:
        settings(**values)
    for name in names:
        assert name in str(raised.value)


def test_credentials_in_an_address_are_refused_without_showing_them() -> None:
    with pytest.raises(ValidationError) as raised:
        settings(blob_store="s3://AKIAID:topsecret@bucket/prefix")
    [problem] = raised.value.errors()
    assert "AWS_" in problem["msg"]
    assert "topsecret" not in problem["msg"]


@pytest.mark.parametrize(
    "values",
    [
        {"blob_store": "s3://bucket"},
        {"blob_store": "s3://my.bucket-1/"},
        {"blob_store": "s3://bucket/a/prefix=1/x.y/"},
        {"heartbeat_s": 10, "silence_s": 25},
        {"silence_s": 12.5},
        {"silence_s": 29.9},
        {"max_payload_bytes": 3 * MIB // 2},
        {"retry_max_backoff_s": 1.0},
    ],
)
def test_the_limits_themselves_are_taken(values: dict[str, object]) -> None:
    settings(**values)


@pytest.mark.parametrize(
    "name", ["lease_s", "heartbeat_s", "sweep_s", "poll_s", "accept_timeout_s", "stop_s"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_durations_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValidationError):
        settings(**{name: value})


@pytest.mark.parametrize("listen", ["0.0.0.0:7310", "10.1.2.3:7310", "[::]:7310", "scheduler.internal:7310"])
def test_an_address_beyond_loopback_must_be_asked_for_by_name(listen: str) -> None:
    with pytest.raises(ValidationError, match="RARA_INSECURE"):
        Settings(database_url="postgresql:///rara", listen=listen)
    assert Settings(database_url="postgresql:///rara", listen=listen, insecure=True).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:7310", "[::1]:7310", "127.8.8.8:1"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert not Settings(database_url="postgresql:///rara", listen=listen).insecure
