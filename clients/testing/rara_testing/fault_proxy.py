"""A TCP proxy that makes the network fail on command.

    async with FaultProxy("127.0.0.1", port) as proxy:
        ...connect to proxy.address...
        proxy.stall(Direction.TO_SERVER)   # bytes stop, nobody is told
        proxy.resume()
        proxy.cut()                        # both ends see an orderly close
        proxy.reset()                      # both ends see RST

Faults act on the open connections; `refuse` acts on new ones too.
"""

import asyncio
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 64 * 1024
_CONNECT_S = 5.0
_IDLE_LOOK_S = 0.05  # how exactly `drop_idle` is kept


class Direction(StrEnum):
    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


class End(StrEnum):
    CLOSE = "close"  # FIN: what was forwarded so far arrives
    RESET = "reset"  # RST: what is under way may be lost


@dataclass(slots=True)
class _Trigger:
    """Ends a connection when byte `after_bytes` or `pattern` is about to pass in `direction`. Fires once."""

    direction: Direction
    how: End
    after_bytes: int | None = None  # so many pass, counted over one connection
    pattern: bytes = b""
    with_pattern: bool = False  # the pattern itself still passes


@dataclass(slots=True, eq=False)
class _Link:
    """One client's connection and the one made for it to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    passed: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    tail: dict[Direction, bytes] = field(default_factory=lambda: dict.fromkeys(Direction, b""))
    moved_at: float = 0.0  # monotonic: the last byte in either direction
    forgotten: bool = False  # bytes are swallowed, and nobody is told

    def end(self, how: End) -> None:
        for writer in (self.client, self.server):
            if how is End.CLOSE:
                writer.close()
                continue
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                # To linger for 0 s makes close() discard what is unsent and send RST.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and forwards to one server. Links made while it stalls stall too.

    host: as for PostgreSQL, an absolute path is the folder of its Unix socket.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = {direction: asyncio.Event() for direction in Direction}
        self._delay_s = 0.0
        self._trigger: _Trigger | None = None
        self._refusing = False
        self._idle_s: float | None = None
        self._idle_end: End | None = None
        self._changed = asyncio.Condition()
        self.port = 0
        self.accepted = 0  # connections taken so far
        self.triggered = asyncio.Event()  # an armed `cut_after` or `cut_at` has fired
        self.resume()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def open_links(self) -> int:
        return len(self._links)

    @property
    def forgotten_links(self) -> int:
        return sum(link.forgotten for link in self._links)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=_CHUNK_BYTES)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut(End.RESET)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ faults

    def cut(self, how: End = End.CLOSE) -> None:
        """End every open connection on both sides; new ones are taken."""
        for link in list(self._links):
            link.end(how)

    def reset(self) -> None:
        """End every open connection with RST on both sides."""
        self.cut(End.RESET)

    def refuse(self) -> None:
        """Reset every new connection at once, until `resume`. Open ones live on."""
        self._refusing = True

    def stall(self, *directions: Direction) -> None:
        """Forward nothing more, without a word to either end. Default: both directions."""
        for direction in directions or tuple(Direction):
            self._flowing[direction].clear()

    def delay(self, seconds: float) -> None:
        """Hold every chunk of bytes back for so long, in both directions."""
        self._delay_s = seconds

    def drop_idle(self, idle_s: float, how: End | None = None) -> None:
        """Treat connections that carried no byte for `idle_s` as a NAT does.

        how None: forget them, so that later bytes vanish and neither end is told.
        """
        self._idle_s, self._idle_end = idle_s, how

    def cut_after(self, byte_count: int, direction: Direction, how: End = End.CLOSE) -> None:
        """Let `byte_count` bytes of a connection pass in `direction`, then end that connection. Fires once."""
        self.triggered.clear()
        self._trigger = _Trigger(direction, how, after_bytes=byte_count)

    def cut_at(
        self, pattern: bytes, direction: Direction, how: End = End.CLOSE, *, with_pattern: bool = False
    ) -> None:
        """End the connection in which `pattern` is about to pass, before its first byte. Fires once.

        with_pattern: after its last byte instead. A pattern that straddles two chunks is found, but its first
        bytes have passed then.
        """
        if not pattern:
            raise ValueError("an empty pattern is in everything")
        self.triggered.clear()
        self._trigger = _Trigger(direction, how, pattern=pattern, with_pattern=with_pattern)

    def resume(self) -> None:
        """Undo stall, delay, refuse, drop_idle and an armed cut. What is forgotten or closed stays so."""
        for flowing in self._flowing.values():
            flowing.set()
        self._delay_s = 0.0
        self._trigger = None
        self._refusing = False
        self._idle_s = None

    async def wait_accepted(self, count: int, timeout_s: float = 10.0) -> None:
        """Wait until `count` connections were taken since the start."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.accepted >= count)

    # ------------------------------------------------------------ forwarding

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="fault proxy link")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._changed:
            self.accepted += 1
            self._changed.notify_all()
        try:
            if self._refusing:
                raise ConnectionRefusedError
            async with asyncio.timeout(_CONNECT_S):
                server_reader, server_writer = await self._dial()
        except (OSError, TimeoutError):
            _Link(writer, writer).end(End.RESET)
            return
        link = _Link(writer, server_writer, moved_at=time.monotonic())
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(link, Direction.TO_SERVER, reader, server_writer))
                pumps.create_task(self._pump(link, Direction.TO_CLIENT, server_reader, writer))
        finally:
            self._links.discard(link)
            link.end(End.CLOSE)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._target
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}", limit=_CHUNK_BYTES)
        return await asyncio.open_connection(host, port, limit=_CHUNK_BYTES)

    async def _pump(
        self, link: _Link, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while chunk := await self._read(link, reader):
                await self._flowing[direction].wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if link.forgotten:
                    continue
                link.moved_at = time.monotonic()
                keep = self._kept_by_trigger(link, direction, chunk)
                writer.write(chunk if keep is None else chunk[:keep])
                if keep is not None and self._trigger is not None:
                    how, self._trigger = self._trigger.how, None
                    link.end(how)
                    self.triggered.set()
                    return
                link.passed[direction] += len(chunk)
                await writer.drain()
            await self._flowing[direction].wait()  # an end is news too
            if not link.forgotten and writer.can_write_eof():
                writer.write_eof()
        except OSError:  # one end is gone, and the other may be waiting for it
            await self._flowing[direction].wait()
            if not link.forgotten:
                link.end(End.RESET)

    async def _read(self, link: _Link, reader: asyncio.StreamReader) -> bytes:
        """The next bytes, looking meanwhile whether the connection counts as idle. Empty: the end."""
        pending = asyncio.ensure_future(reader.read(_CHUNK_BYTES))
        try:
            while not (await asyncio.wait({pending}, timeout=_IDLE_LOOK_S))[0]:
                if self._idle_s is None or link.forgotten:
                    continue
                if time.monotonic() - link.moved_at >= self._idle_s:
                    if self._idle_end is None:
                        link.forgotten = True
                    else:
                        link.end(self._idle_end)
            return pending.result()
        finally:
            pending.cancel()

    def _kept_by_trigger(self, link: _Link, direction: Direction, chunk: bytes) -> int | None:
        """How many bytes of the chunk still pass before the armed cut; None: no cut in this chunk."""
        trigger = self._trigger
        if trigger is None or trigger.direction is not direction:
            return None
        if trigger.after_bytes is not None:
            left = trigger.after_bytes - link.passed[direction]
            return max(left, 0) if left < len(chunk) else None
        tail = link.tail[direction]
        found = (tail + chunk).find(trigger.pattern)
        keep_back = len(trigger.pattern) - 1
        link.tail[direction] = (tail + chunk)[-keep_back:] if keep_back else b""
        if found < 0:
            return None
        end = found + len(trigger.pattern) if trigger.with_pattern else found
        return max(end - len(tail), 0)
