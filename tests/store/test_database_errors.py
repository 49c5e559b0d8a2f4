"""What becomes of errors of the driver where a connection is given back."""

import asyncio
from contextlib import nullcontext
from typing import Any

import asyncpg
import pytest
from rara_scheduler.domain.errors import Code
from rara_scheduler.store.database import Database, StoreUnavailable


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, None),
        (TimeoutError(), StoreUnavailable),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (ValueError("ours"), ValueError),
    ],
)
async def test_a_connection_that_the_pool_has_ended_while_it_was_given_back_hides_nothing(
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    told: type[BaseException] | None,
) -> None:
    """A release that runs out of time ends the connection itself, and it cannot be ended again."""
    released = asyncpg.pool.Pool.release

    async def late(pool: Any, connection: Any, **more: Any) -> None:
        await released(pool, connection, **more)
        raise TimeoutError

    database = Database(database_url)
    await database.open()
    monkeypatch.setattr(asyncpg.pool.Pool, "release", late)
    with nullcontext() if told is None else pytest.raises(told) as caught:
        async with database.connection() as connection:
            assert await connection.fetchval("select 1") == 1
            if error is not None:
                raise error
    monkeypatch.undo()
    if isinstance(error, TimeoutError):
        assert caught is not None
        assert isinstance(caught.value, StoreUnavailable)
        assert caught.value.code is Code.STORE_UNAVAILABLE
    else:
        assert (caught and caught.value) is error
    async with database.connection() as connection:
        assert await connection.fetchval("select 2") == 2
    await database.close()
