"""The scheduler's health check, as its container runs it."""

import asyncio
from pathlib import Path

import pytest
from rara_scheduler.health import main, own_address
from support.running_scheduler import running_scheduler


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("0.0.0.0:7310", "127.0.0.1:7310"),
        ("[::]:7310", "[::1]:7310"),
        ("10.0.0.5:80", "10.0.0.5:80"),
        ("localhost:1", "localhost:1"),
    ],
)
def test_a_wildcard_is_asked_on_loopback(listen: str, asked: str) -> None:
    assert own_address(listen) == asked


async def test_it_passes_while_the_scheduler_serves_and_says_why_when_not(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        monkeypatch.setenv("RARA_LISTEN", world.address)
        await until_it_passes()  # it serves from the first sweep on
    with pytest.raises(SystemExit, match="UNAVAILABLE"):
        await asyncio.to_thread(main)


async def until_it_passes() -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await asyncio.to_thread(main)
                return
            except SystemExit as refusal:
                assert str(refusal).endswith("NOT_SERVING")  # noqa: PT017 - one answer of several
                await asyncio.sleep(0.05)
