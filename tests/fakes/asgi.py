"""A client that calls an ASGI application directly: whole answers, streams chunk by chunk, clients that leave or do not read."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(slots=True)
class Answer:
    """A response as it came; `chunks` are the body messages."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    chunks: list[bytes] = field(default_factory=list[bytes])

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The `data:` payloads of a stream; "[DONE]" as a string."""
        payloads = [line[len("data: ") :] for line in self.body.decode().split("\n\n") if line]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


class Connection:
    """One request in progress. `answer` fills while `task` runs."""

    def __init__(self, app: ASGIApp, method: str, path: str, parts: list[bytes], headers: dict[str, str]) -> None:
        self.answer = Answer()
        self.left = asyncio.Event()  # set: the client is gone
        self.reading = asyncio.Event()  # clear: the client reads nothing
        self.reading.set()
        self._arrived = asyncio.Condition()
        self._parts = list(parts)
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._parts:
            body = self._parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        if self.left.is_set():
            return
        async with self._arrived:
            if message["type"] == "http.response.start":
                assert not self.answer.status, "two responses"
                self.answer.status = message["status"]
                self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                self.answer.chunks.append(message["body"])
            self._arrived.notify_all()

    async def num_chunks(self, number: int) -> None:
        """Wait until that many body messages have come."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: len(self.answer.chunks) >= number), 5)

    async def leave(self) -> None:
        """Close the connection and wait for the application to notice."""
        self.left.set()
        await asyncio.wait_for(self.task, 5)


class AsgiClient:
    """Sends requests to one application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def open(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
    ) -> Connection:
        """Begin a request. `body`: bytes as they are, anything else as JSON; `parts`: a body in pieces without a length."""
        given = {"host": "127.0.0.1:8000", "content-type": "application/json", **(headers or {})}
        if parts is None:
            data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            given = {"content-length": str(len(data)), **given}
            parts = [data]
        return Connection(self.app, method, path, parts, given)

    async def post(self, path: str, body: object = None, **options: Any) -> Answer:
        connection = self.open(path, body, **options)
        await asyncio.wait_for(connection.task, 20)
        return connection.answer

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.post(path, method="GET", **options)
