"""The server: connections that stall, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.serving.door import Door

__all__ = ["Server", "make_server"]

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 5.0
"""In which clients can still take what is said to them when their requests are aborted."""

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep theirs, so that none is closed under a request. It begins when an answer
is with the kernel: a slow client may still be reading it then."""


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for a client that neither sends nor takes nor leaves.

    Attributes:
        stall_seconds: For which a client may take nothing of an answer, or send no whole head.
    """

    stall_seconds = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asking: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._asking = _stopped(self._asking)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_room(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking = _stopped(self._taking)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._asking, self._taking = _stopped(self._asking), _stopped(self._taking)

    def _wait_for_head(self) -> None:
        if self._asking is None:
            self._asking = self.loop.call_later(self.stall_seconds, self._give_up)

    def _wait_for_room(self, left: int) -> None:
        self._taking = self.loop.call_later(self.stall_seconds, self._check_taken, left)

    def _check_taken(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._wait_for_room(left)
        else:
            self._give_up()

    def _give_up(self) -> None:
        logger.warning("cut off %s, who stalled for %g s", self.client, self.stall_seconds)
        cut_off(self.transport)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


class Server(uvicorn.Server):
    """Ends in three steps. A signal lets nothing more in and waits for what is there. Another, or
    `drain_seconds`, aborts that, and each client is told so. Who does not take it within
    `GOODBYE_SECONDS` is cut off.
    """

    def __init__(self, config: uvicorn.Config, door: Door, drain_seconds: float) -> None:
        super().__init__(config)
        self._door = door
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hurry = asyncio.get_running_loop().call_later(self._drain_seconds, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            hurry.cancel()

    def _abort(self) -> None:
        self._door.close()
        logger.warning("aborting %d sequences", self._door.num_sequences)
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            cut_off(connection.transport)


def cut_off(transport: asyncio.Transport) -> None:
    """End a connection, and what the kernel holds of it for a client that does not take it."""
    reset = struct.pack("ii", 1, 0)  # linger for no second
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    transport.abort()


def make_server(
    app: ASGIApp,
    door: Door,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_seconds: float = 30.0,
    stall_seconds: float = Connection.stall_seconds,
    **options: Any,
) -> Server:
    """A server of an app with this door; `options` are those of `uvicorn.Config`."""
    config = uvicorn.Config(
        app,
        host,
        port,
        http=type("Connection", (Connection,), {"stall_seconds": stall_seconds}),
        ws="none",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        proxy_headers=False,
        server_header=False,
        **options,
    )
    return Server(config, door, drain_seconds)
