"""Connections to the schedulers under load, secured as those of the `rara` command are."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import cycle
from os import environ

from rara_client import Client, Security
from rara_client.channel import channel_options
from rara_client.client import USER_AGENT


@contextlib.asynccontextmanager
async def clients(addresses: Sequence[str], connections: int) -> AsyncIterator[list[Client]]:
    """So many to each address, each over a connection of its own. Raises ValueError for settings that cannot be."""
    security = Security.from_environment(environ)
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Client(security.channel(address, _options(address))))
            for address, _ in zip(cycle(addresses), range(connections * len(addresses)), strict=False)
        ]


def _options(address: str) -> list[tuple[str, str | int]]:
    # Without a pool of its own, a channel shares the connection of every other one to the same address.
    return [*channel_options(address, USER_AGENT), ("grpc.use_local_subchannel_pool", 1)]
