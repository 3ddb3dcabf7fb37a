"""Runs the application under uvicorn: the socket, signals, the ready line, and an end that nobody notices too late.

The CLI binds the socket before it loads the model (a taken port must say so at once), starts an engine, and awaits `run_server`.
"""

import asyncio
import errno
import gc
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.config import ServerConfig
from paceline.errors import BadInputError, EngineDeadError, MissingError
from paceline.metrics.requests import ErrorKind
from paceline.server.app import Server
from paceline.server.connection import connection_class, limit_send_buffer
from paceline.server.engine_port import Engine
from paceline.server.inflight import InFlight
from paceline.server.log import configure_logging
from paceline.server.ready import ready_line, say

_log = logging.getLogger(__name__)

_BACKLOG = 4096  # connections that wait for `accept`; a burst of clients must not be refused
_OBJECTS_PER_COLLECTION = 10_000  # Python's 700 are those of three requests: a burst would be gone through again and again as it grows
_LAST_EVENTS_S = 5  # after the shut-down limit, for the error events of what still ran
_DEATH_GRACE_S = 3.0  # from the engine's death to the server's end: streams get their error events, probes each second their 503


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening: until the model is loaded clients are refused, not kept waiting.

    Port 0 takes a free one. Raises MissingError for a port that is taken or forbidden, BadInputError for a host that is not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise BadInputError(f"--host {host} is not an address or name of this machine: {error.strerror}", param="host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # Without this a restart would have to wait for the old connections' TIME_WAIT; a listening socket still blocks the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_send_buffer(listener)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _binding_error(error, host, port) from error
    return listener


async def run_server(
    engine: Engine,
    config: ServerConfig,
    folder: Path,
    listener: socket.socket,
    announce: Callable[[str], None] = say,
    make_server: Callable[[Engine, ServerConfig, Path, InFlight], Server] = Server,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation; running answers then get `config.shutdown_timeout` seconds.

    The engine stays the caller's, who closes it. `announce` is called once, with the ready line. Meant for uvloop's event loop.
    Raises EngineDeadError if the engine fails to warm up or, a few seconds later, if it dies; MissingError if the port was taken;
    BadInputError if the model's chat template cannot be used.
    """
    configure_logging(config.log_format)
    in_flight = InFlight()
    server = make_server(engine, config, folder, in_flight)
    try:
        await server.start()
        if config.warmup:
            health = await server.health.probe()
            if not health.is_healthy:
                raise EngineDeadError(f"the engine did not warm up: {health.reason}")
        gc.collect()
        gc.freeze()  # what is loaded now stays; going through all of it again would hold up every stream for 50 ms and more
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
        await _serve(server, engine, config, listener, in_flight, announce)
    finally:
        await server.close()


async def _serve(
    server: Server, engine: Engine, config: ServerConfig, listener: socket.socket, in_flight: InFlight, announce: Callable[[str], None]
) -> None:
    uvicorn_config = uvicorn.Config(
        server.app,
        loop="uvloop",
        http=connection_class(lambda: server.metrics.error(ErrorKind.SLOW_READER)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings are about what clients send, and a client must not fill the log
        access_log=False,  # costs more than a chunk at load
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + _LAST_EVENTS_S,
    )
    line = ready_line(listener, config.host, *server.example())
    draining = _DrainingServer(uvicorn_config, engine, in_flight, config, lambda: announce(line))
    serving = asyncio.create_task(draining.serve([listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        draining.should_exit = True  # cancelling uvicorn itself would leave its connections open
        await serving
        raise
    finally:
        listener.close()
    if draining.ended_by_death:
        raise EngineDeadError("the engine has stopped, and the server with it; messages above say why. Start the server again")


class _DrainingServer(uvicorn.Server):
    """uvicorn, but running answers end with an error event when their time is up, and signals do not kill the caller's clean-up.

    It ends soon after the engine has died: a process manager can only start again what has ended.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, in_flight: InFlight, ours: ServerConfig, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.ended_by_death = False
        self._engine = engine
        self._in_flight = in_flight
        self._ours = ours
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death_s: float | None = None  # time.monotonic() when the engine was first seen dead

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _binding_error(error, self._ours.host, self._ours.port) from error
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends serving."""
        if self._death_s is None and not self._engine.is_alive:
            self._death_s = time.monotonic()
            _log.error("the engine has stopped; the server ends in %g s", _DEATH_GRACE_S)
        if self._death_s is not None and time.monotonic() - self._death_s >= _DEATH_GRACE_S:
            self.ended_by_death = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._in_flight.is_draining = True
        running_s = self._ours.shutdown_timeout
        if self.ended_by_death:  # nothing that still runs can come to a good end; clients that do not read must not hold the process
            running_s, self.config.timeout_graceful_shutdown = 0, _LAST_EVENTS_S
        timer = asyncio.get_running_loop().call_later(running_s, self._in_flight.interrupt_all)
        await self._in_flight.end_background()  # nobody could fetch their results any more
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the shut-down; a second one ends what still runs."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._in_flight.interrupt_all)
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while serving. uvicorn's own raises them again at the end, which would kill the process before it is tidy."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _binding_error(error: OSError, host: str, port: int) -> MissingError | BadInputError:
    match error.errno:
        case errno.EADDRINUSE:
            return MissingError(f"port {port} on {host} is taken; stop the other server or start with --port {port % 65535 + 1}")
        case errno.EACCES:
            return MissingError(f"port {port} needs privileges that this user lacks; start with --port 8000 or another above 1023")
        case errno.EADDRNOTAVAIL:
            return BadInputError(f"--host {host} is no address of this machine; use 127.0.0.1 or one that `ip addr` shows", param="host")
        case _:
            return MissingError(f"cannot listen on {host} port {port}: {error.strerror}")
