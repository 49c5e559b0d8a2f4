"""The fault proxy does to a connection what it says, and nothing else."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rara_testing.fault_proxy import Direction, End, FaultProxy

_WAIT_S = 5.0
_SILENCE_S = 0.15  # long enough on a loaded machine for a byte to have arrived on the loopback


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """A server that returns each byte; its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, count: int) -> bytes:
        async with asyncio.timeout(_WAIT_S):
            return await self.reader.readexactly(count)

    async def rest(self) -> bytes:
        async with asyncio.timeout(_WAIT_S):
            return await self.reader.read()

    async def is_silent(self) -> bool:
        try:
            async with asyncio.timeout(_SILENCE_S):
                return not await self.reader.read(1)
        except TimeoutError:
            return True


@asynccontextmanager
async def proxied_client() -> AsyncIterator[tuple[FaultProxy, Client]]:
    async with echo_server() as port, FaultProxy("127.0.0.1", port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        client = Client(reader, writer)
        try:
            await client.send(b"hello")
            assert await client.receive(5) == b"hello"
            yield proxy, client
        finally:
            writer.close()


async def test_bytes_pass_unchanged_and_an_end_is_passed_on() -> None:
    async with proxied_client() as (proxy, client):
        data = bytes(range(256)) * 4096
        sending = asyncio.create_task(client.send(data))
        assert await client.receive(len(data)) == data
        await sending
        client.writer.write_eof()
        assert await client.rest() == b""
        assert proxy.accepted == 1


async def test_cut_is_an_orderly_end_and_a_new_connection_works() -> None:
    async with proxied_client() as (proxy, client):
        proxy.cut()
        assert await client.rest() == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        again = Client(reader, writer)
        await again.send(b"x")
        assert await again.receive(1) == b"x"
        await proxy.wait_accepted(2)
        writer.close()


async def test_reset_is_felt_as_a_reset() -> None:
    async with proxied_client() as (proxy, client):
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_stall_loses_nothing_and_tells_nobody() -> None:
    async with proxied_client() as (proxy, client):
        proxy.stall(Direction.TO_CLIENT)
        await client.send(b"abc")
        assert await client.is_silent()
        assert proxy.open_links == 1
        proxy.resume()
        assert await client.receive(3) == b"abc"


async def test_delay_holds_bytes_back() -> None:
    async with proxied_client() as (proxy, client):
        proxy.delay(0.1)
        started = asyncio.get_running_loop().time()
        await client.send(b"abc")
        assert await client.receive(3) == b"abc"
        assert asyncio.get_running_loop().time() - started >= 0.2  # once each way


async def test_a_forgotten_idle_connection_swallows_bytes() -> None:
    async with proxied_client() as (proxy, client):
        proxy.drop_idle(0.05)
        assert await client.is_silent()
        await client.send(b"abc")
        assert await client.is_silent()
        assert proxy.open_links == 1


async def test_an_idle_connection_can_be_reset_instead() -> None:
    async with proxied_client() as (proxy, client):
        proxy.drop_idle(0.05, End.RESET)
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_connection_is_cut_at_the_nth_byte() -> None:
    async with proxied_client() as (proxy, client):
        proxy.cut_after(5 + 3, Direction.TO_CLIENT)  # 5 have passed already
        await client.send(b"abcdef")
        assert await client.rest() == b"abc"
        assert proxy.triggered.is_set()


@pytest.mark.parametrize(("with_pattern", "left"), [(False, b"ab"), (True, b"abcd")])
async def test_a_connection_is_cut_where_a_pattern_passes(with_pattern: bool, left: bytes) -> None:
    async with proxied_client() as (proxy, client):
        proxy.cut_at(b"cd", Direction.TO_CLIENT, with_pattern=with_pattern)
        await client.send(b"abcdef")
        assert await client.rest() == left
        assert proxy.triggered.is_set()


async def test_a_pattern_that_comes_in_two_pieces_is_found() -> None:
    async with proxied_client() as (proxy, client):
        proxy.cut_at(b"cd", Direction.TO_SERVER)
        await client.send(b"abc")
        assert await client.receive(3) == b"abc"
        await client.send(b"def")
        assert await client.rest() == b""
        assert proxy.triggered.is_set()


async def test_refused_connections_are_reset_until_resumed() -> None:
    async with proxied_client() as (proxy, client):
        proxy.refuse()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await Client(reader, writer).rest()
        await client.send(b"still")
        assert await client.receive(5) == b"still"
        proxy.resume()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        await Client(reader, writer).send(b"again")
        assert await Client(reader, writer).receive(5) == b"again"
        writer.close()


async def test_a_server_that_is_away_looks_like_a_reset() -> None:
    async with echo_server() as port:
        pass
    async with FaultProxy("127.0.0.1", port) as proxy:
        reader, _ = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_unix_server(greet, tmp_path / ".s.PGSQL.5432")
    async with FaultProxy(str(tmp_path), 5432) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        async with asyncio.timeout(_WAIT_S):
            assert await reader.read() == b"hello"
        writer.close()
    server.close()


async def test_a_server_that_dies_is_told_to_the_waiting_client() -> None:
    """With bytes unread, the kernel resets its connection instead of closing it."""

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    async with FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"are you there?")
        async with asyncio.timeout(_WAIT_S):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()
    server.close()
