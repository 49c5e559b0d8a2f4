"""What may be served and dialled beyond loopback, and with which words it is refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rara_client import Client, Security
from rara_scheduler.settings import Settings
from support.certificates import Authority
from support.command_line import rara

FAR = "10.1.2.3:7310"


def settings(**values: Any) -> Settings:
    return Settings(database_url="postgresql:///rara", **values)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    authority = Authority.new(tmp_path)
    pair = authority.pair("scheduler")
    return {"tls_cert": pair.certificate, "tls_key": pair.key, "tls_client_ca": authority.file}


def test_beyond_loopback_a_port_speaks_tls_and_knows_its_callers(files: dict[str, Any]) -> None:
    tls = {name: files[name] for name in ("tls_cert", "tls_key")}
    for safe in ({"auth": "tokens"}, {"tls_client_ca": files["tls_client_ca"]}):
        assert settings(listen=FAR, **tls, **safe).exposed == []
    for unsafe, said in (
        ({}, ["RARA_TLS_CERT", "RARA_AUTH"]),
        ({"auth": "tokens"}, ["RARA_TLS_CERT"]),
        (tls, ["RARA_AUTH"]),
    ):
        with pytest.raises(ValidationError) as refused:
            settings(listen=FAR, **unsafe)
        assert all(name in str(refused.value) for name in (*said, "RARA_INSECURE=1")), unsafe
        assert len(settings(listen=FAR, insecure=True, **unsafe).exposed) == len(said)


def test_on_loopback_nothing_is_asked_for() -> None:
    assert settings().exposed == []
    assert settings(auth="tokens").exposed == []


def test_jobs_and_tokens_go_to_far_executors_by_tls_alone(files: dict[str, Any]) -> None:
    far = {"direct_executors": FAR}
    with pytest.raises(ValidationError, match="RARA_TLS_CA"):
        settings(**far)
    assert settings(**far, insecure=True).exposed
    assert settings(**far, tls_ca="system", direct_token="a-secret").exposed == []
    with pytest.raises(ValidationError, match="go together"):
        settings(**far, tls_ca="system", tls_client_cert="a")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": "a"}, "RARA_TLS_KEY"),
        ({"tls_client_ca": "a"}, "RARA_TLS_CERT"),
        ({"direct_token": "a-secret", "direct_token_file": "b"}, "RARA_DIRECT_TOKEN_FILE"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_without_the_token(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as refused:
        settings(**given)
    assert "a-secret" not in str(refused.value.errors(include_input=False, include_url=False))
    assert "a-secret" not in repr(settings(direct_token="a-secret"))


async def test_a_token_leaves_the_machine_encrypted_or_as_asked_for(tmp_path: Path) -> None:
    token = "rara_client_made-up"
    with pytest.raises(ValueError, match="needs TLS"):
        Client.connect(FAR, token=token)
    with pytest.raises(ValueError, match="RARA_INSECURE=1") as refused:
        Client.connect(FAR, security=Security(token=token))
    assert token not in str(refused.value)
    assert token not in repr(Security(token=token))
    async with Client.connect(FAR, security=Security(token=token, insecure=True)):
        pass
    env = {"RARA_SERVER": "127.0.0.2.example:1", "RARA_TOKEN": token, "RARA_TIMEOUT": "0.2"}
    refusal = await rara("run", "list", env=env)
    assert (refusal.code, "RARA_TLS_CA" in refusal.err, token in refusal.err) == (2, True, False)
    warned = await rara("run", "list", env=env | {"RARA_INSECURE": "1"})
    assert (warned.code, "warning: RARA_INSECURE=1" in warned.err, token in warned.err) == (6, True, False)
