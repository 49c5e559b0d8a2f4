"""How often uploads are counted: once for all who wait, nothing that nobody bounds, and seldom where it is dear."""

import asyncio
from typing import Any

import pytest
from rara_scheduler.blobs.admission import Admission, UploadLimits
from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.domain.errors import Code, Fault

DIGEST = BlobDigest("a" * 64, 10)


class Rows:
    """Counts how often it is asked. took_s: how long an answer takes, by the clock."""

    def __init__(self, used_bytes: int = 0, took_s: float = 0.0) -> None:
        self.used_bytes = used_bytes
        self.took_s = took_s
        self.now = 0.0
        self.asked: list[bool] = []

    async def store_load(self, *, with_blobs: bool) -> tuple[int, int]:
        self.asked.append(with_blobs)
        used_bytes = self.used_bytes
        await asyncio.sleep(0)
        self.now += self.took_s
        return 0, used_bytes


class Disk:
    async def free_bytes(self) -> None:
        return None


def admission(rows: Any, quota_bytes: int | None = 100) -> Admission:
    disk: Any = Disk()
    return Admission(disk, rows, UploadLimits(quota_bytes=quota_bytes), clock=lambda: rows.now)


async def code_of(admits: Admission) -> Code | None:
    try:
        async with admits.place(DIGEST, None):
            return None
    except Fault as fault:
        return fault.code


@pytest.mark.parametrize("quota_bytes", [None, 100])
async def test_blobs_are_counted_for_a_quota_alone(quota_bytes: int | None) -> None:
    rows = Rows()
    assert await code_of(admission(rows, quota_bytes)) is None
    assert rows.asked == [quota_bytes is not None]


async def test_those_who_come_together_look_once() -> None:
    rows = Rows(used_bytes=95)
    admits = admission(rows)
    assert set(await asyncio.gather(*(code_of(admits) for _ in range(50)))) == {Code.QUOTA_EXCEEDED}
    assert len(rows.asked) == 1
    rows.used_bytes = 0  # a later call looks before it is refused
    assert await code_of(admits) is None
    assert len(rows.asked) == 2


async def test_a_dear_look_is_taken_a_fifth_of_the_time() -> None:
    rows = Rows(used_bytes=95, took_s=1.0)
    admits = admission(rows)
    for _ in range(100):
        assert await code_of(admits) is Code.QUOTA_EXCEEDED
        rows.now += 0.1
    # 10 s passed between calls, and 1 s in each look, which four of rest follow.
    assert 2 <= len(rows.asked) <= 3
    rows.used_bytes = 0
    rows.now += 4.0
    assert await code_of(admits) is None
