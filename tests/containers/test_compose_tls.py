"""The compose file with TLS, client certificates and tokens, by the commands of its page."""

import shlex
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from rara_client import Client, RaraError, Security
from support.compose import ROOT, typed
from support.transcripts import commands

pytestmark = [pytest.mark.needs("containers"), pytest.mark.soak]

PAGE = (ROOT / "docs" / "how-to" / "run-with-compose.md").read_text()
SECTION = PAGE.partition("\n## With TLS and tokens")[2].partition("\n## ")[0]
FILES = "docker compose -f deploy/docker-compose.yml -f deploy/docker-compose.tls.yml"
CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Secured:
    project: str
    folder: Path
    address: str
    said: dict[str, str]

    async def typed(self, line: str) -> str:
        return await typed(line, self.project, {"RARA_TLS_DIR": str(self.folder)})


def in_test(line: str, folder: Path, address: str) -> str:
    """The line with this test's places."""
    line = line.replace("deploy/tls/", f"{folder}/").replace("operator.token", f"{folder}/operator.token")
    line = line.replace(f"tokens/{folder}/", "tokens/")
    return line.replace(".venv/bin/rara", f"RARA_SERVER={address} {shlex.quote(sys.executable)} -m rara_cli")


@pytest_asyncio.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """The system of the page's section, which is up, and what its commands have said."""
    folder = tmp_path_factory.mktemp("tls")
    folder.chmod(0o755)
    made = Secured(f"rara-test-{uuid.uuid4().hex[:8]}", folder, "", {})
    address = ""
    try:
        for line in commands(SECTION):
            made.said[line] = await made.typed(in_test(line, folder, address))
            if " up " in line:
                address = (await made.typed(f"{FILES} port scheduler 7310")).strip()
        yield Secured(made.project, folder, address, made.said)
    finally:
        await made.typed(f"{FILES} --profile '*' down -v --timeout 1")


def security(folder: Path, *, token: str | None, certificate: bool = True) -> Security:
    return Security(
        tls_ca=str(folder / "ca.pem"),
        tls_client_cert=folder / "client.pem" if certificate else None,
        tls_client_key=folder / "client.key" if certificate else None,
        token=token,
    )


async def test_the_commands_of_the_section_run_the_example_in_both_languages(secured: Secured) -> None:
    _, _, started, _, listed = secured.said.values()
    assert started.splitlines()[-1].startswith("run ")
    assert " succeeded in " in started.splitlines()[-1]
    assert "knowledge-pipeline-go v1" in listed
    shown = await secured.typed(f"{FILES} run --rm cli rara step get --latest clean")
    assert "in go (rara-go/" in shown


async def test_without_certificate_token_or_role_a_call_is_refused(secured: Secured) -> None:
    operator = (secured.folder / "operator.token").read_text().strip()
    executor = await secured.typed(f"{FILES} run --rm cli cat /var/lib/rara/tokens/executor.token")
    refused = {}
    for name, by in {
        "plain text": Security(),
        "no certificate": security(secured.folder, token=operator, certificate=False),
        "no token": security(secured.folder, token=None),
        "an executor's token": security(secured.folder, token=executor.strip()),
    }.items():
        async with Client.connect(secured.address, security=by) as client:
            with pytest.raises(RaraError) as caught:
                await client.list_definitions(timeout_s=CALL_S).__anext__()
        refused[name] = caught.value.reason
    assert refused == {
        "plain text": "UNAVAILABLE",
        "no certificate": "UNAVAILABLE",
        "no token": "CREDENTIAL_INVALID",
        "an executor's token": "NOT_ALLOWED",
    }
