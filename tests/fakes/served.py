"""A server on a real socket, in a thread with an event loop of its own, for tests that need a client's side of the connection."""

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import openai
import uvloop

from paceline.config import ServerConfig
from paceline.errors import EngineDeadError
from paceline.server.app import Server
from paceline.server.run import bind_socket, run_server
from tests.fakes.fake_engine import FakeEngine


class Served:
    """A server in a thread with its own uvloop; `engine` lives there."""

    def __init__(self, engine: Callable[[], FakeEngine], folder: Path, config: ServerConfig, make_server: type[Server] = Server) -> None:
        self._ready = threading.Event()
        self._make, self._folder, self._config, self._make_server = engine, folder, config, make_server
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Served":
        self.thread.start()
        assert self._ready.wait(10)
        self.url = self.lines[0].split()[4]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._task.cancel)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=5)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.engine = self._make()
        listener = bind_socket("127.0.0.1", 0)
        self._task = asyncio.create_task(run_server(self.engine, self._config, self._folder, listener, self._announce, self._make_server))
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        except EngineDeadError as error:
            self.error = error

    def _announce(self, line: str) -> None:
        self.lines.append(line)
        self._ready.set()
