"""The connection that `run.py` gives uvicorn: uvicorn's own, with an end to its patience for a client that does not read.

An answer waits while its connection's write buffer is over the mark, so a slow reader makes the server hold that buffer and no more.
Without an end to the wait it would hold a place in the engine for ever.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

SEND_BUFFER_BYTES = 128 * 1024  # of the kernel, per connection; by itself it grows to megabytes that a stuck client holds
WRITE_BUFFER_BYTES = 64 * 1024  # of the process, per connection: an answer goes on when half of it has been taken
READER_TIMEOUT_S = 30.0  # to take that half

_RESET = struct.pack("ii", 1, 0)  # close without delivering what the kernel still holds


PART_WRITER = "paceline.part_writer"  # in an ASGI scope: a PartWriter


class PartWriter:
    """Writes parts of a chunked body to the socket at once, without the way through ASGI's messages, which costs as much as the writing."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: the body has begun and has no end yet, and the client takes what it gets."""
        cycle = self._cycle
        if cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
            return False
        return cycle.response_started and cycle.chunked_encoding is True

    def write(self, part: bytes) -> None:
        """Write a part that is not empty; for use while `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def limit_send_buffer(listener: socket.socket) -> None:
    """Bound what the kernel buffers for the connections that `listener` accepts, which inherit the setting."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def connection_class(on_cut: Callable[[], None]) -> type[HttpToolsProtocol]:
    """The class of a server's connections. `on_cut` is called for each one that was cut because its client did not read."""

    class Connection(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            cycle = cast(RequestResponseCycle | None, self.cycle)
            if cycle is not None:  # a request for another protocol has none
                cast(dict[str, object], cycle.scope)[PART_WRITER] = PartWriter(cycle)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES // 2)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._patience = self.loop.call_later(READER_TIMEOUT_S, self._cut)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()

        def _cut(self) -> None:
            on_cut()
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()  # closing would first wait for the client to read the rest

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Connection
