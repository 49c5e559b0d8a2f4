"""A DNS server that knows one IPv4 address for every name, which may change: for gRPC targets `dns://SERVER/NAME:PORT`."""

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import AsyncIterator
from typing import cast

_TYPE_A = 1
_HEADER_BYTES = 12


class NameServer(asyncio.DatagramProtocol):
    def __init__(self, address: str) -> None:
        self.address = address  # what names stand for now
        self.asked = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    @property
    def place(self) -> str:
        assert self._transport is not None
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """RFC 1035, section 4: one question; the answer lives for no time at all."""
        assert self._transport is not None
        end = data.index(0, _HEADER_BYTES) + 5  # the name, its type, its class
        (kind,) = struct.unpack(">H", data[end - 4 : end - 2])
        answer = b""
        if kind == _TYPE_A:
            self.asked += 1
            packed = ipaddress.IPv4Address(self.address).packed
            answer = struct.pack(">HHHIH", 0xC00C, _TYPE_A, 1, 0, len(packed)) + packed
        header = data[:2] + struct.pack(">HHHHH", 0x8180, 1, 1 if answer else 0, 0, 0)
        self._transport.sendto(header + data[_HEADER_BYTES:end] + answer, addr)


@contextlib.asynccontextmanager
async def name_server(address: str) -> AsyncIterator[NameServer]:
    """Listens on a port of 127.0.0.1."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(address), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
