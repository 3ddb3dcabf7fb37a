"""Clients that read slowly or not at all, over a real socket: what the server holds for them is bounded, and they are let go."""

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from paceline.config import ServerConfig
from paceline.core.outcome import TokenDelta
from paceline.core.request import Request
from paceline.engine.client import DeltaSink
from paceline.server import connection
from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.fakes.served import Served

NUM_TOKENS = 40_000
CHUNK_BYTES = 160  # at least
TIMEOUT_S = 1.0


@dataclass(slots=True)
class CountingEngine(FakeEngine):
    """Counts the deltas that were asked of it; an answer has megabytes of chunks."""

    num_deltas: int = 0

    def _deltas(self, request: Request) -> Iterable[TokenDelta]:
        for delta in FakeEngine._deltas(self, request):
            self.num_deltas += 1
            yield delta


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connection, "READER_TIMEOUT_S", TIMEOUT_S)
    facts = replace(FACTS, max_model_len=1 << 20, max_position_embeddings=1 << 20)

    def engine() -> FakeEngine:
        return CountingEngine(facts=facts, answer=lambda _: (), chunk=1)

    with Served(engine, folder, ServerConfig(warmup=False)) as served:
        yield served


def ask(served: Served, num_tokens: int, receive_buffer_bytes: int = 4096) -> socket.socket:
    """A client that has sent a request for a stream and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.settimeout(10)
    client.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    body = json.dumps({"prompt": [5], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.01)


def read_to_the_end(client: socket.socket) -> None:
    while client.recv(65536):
        pass


def counts(served: Served) -> str:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=5) as answer:
        return answer.read().decode()


def engine_of(served: Served) -> CountingEngine:
    assert isinstance(served.engine, CountingEngine)
    return served.engine


def test_a_client_that_reads_nothing_is_bounded_and_then_let_go(served: Served) -> None:
    with ask(served, NUM_TOKENS) as client:
        wait_for(lambda: engine_of(served).num_deltas > 0)
        num_seen = -1
        while num_seen != engine_of(served).num_deltas:  # until the answer waits for its reader
            num_seen = engine_of(served).num_deltas
            time.sleep(0.2)
        assert engine_of(served).num_active == 1, "it was let go at once"
        # The kernel doubles what it is asked for; the receive buffer and what the estimate of a chunk lacks are the rest.
        held_bytes = connection.WRITE_BUFFER_BYTES + 2 * connection.SEND_BUFFER_BYTES
        assert num_seen * CHUNK_BYTES < 1.5 * held_bytes
        assert num_seen < NUM_TOKENS / 2
        wait_for(lambda: len(engine_of(served).aborted) == 1, 5 * TIMEOUT_S)
        assert engine_of(served).num_active == 0
        assert 'paceline_errors_total{kind="slow_reader"} 1.0' in counts(served)
        with pytest.raises(ConnectionError):
            read_to_the_end(client)
    with ask(served, 10) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_byte_by_byte_is_let_go_too(served: Served) -> None:
    with ask(served, NUM_TOKENS) as client:
        deadline_s = time.monotonic() + 10 * TIMEOUT_S
        while not engine_of(served).aborted:
            assert client.recv(1)
            assert time.monotonic() < deadline_s, "one byte now and then held the request"
            time.sleep(0.02)
        assert engine_of(served).num_active == 0


def test_a_slow_but_steady_reader_gets_everything(served: Served) -> None:
    """Much longer than the limit in all, but never without progress for so long."""
    with ask(served, 6000, receive_buffer_bytes=65536) as client:
        began_s, data = time.monotonic(), bytearray()
        while b"[DONE]" not in data[-100:]:
            part = client.recv(16384)
            assert part, "cut off"
            data += part
            time.sleep(0.03)
    assert time.monotonic() - began_s > TIMEOUT_S
    assert data.count(b"data: ") == 6000 + 1
    assert engine_of(served).aborted == []
    assert 'paceline_errors_total{kind="slow_reader"} 0.0' in counts(served)


async def submit_together(self: CountingEngine, request: Request, sink: DeltaSink | None = None) -> AsyncGenerator[TokenDelta, None]:
    """As the engine's client does it where the event loop is behind: three steps as one, but for the first and the last."""
    first, *middle, last = self._deltas(request)
    yield first
    for start in range(0, len(middle), 3):
        await asyncio.sleep(0)
        delta, *more = middle[start : start + 3]
        if sink is None or not sink(delta, more):
            for each in (delta, *more):
                yield each
    yield last


@pytest.mark.parametrize("num_together", [1, 3])
def test_text_is_whole_on_both_ways_to_the_client(served: Served, monkeypatch: pytest.MonkeyPatch, num_together: int) -> None:
    """A client that pauses makes the server change between them; nothing is lost, doubled or out of order."""
    if num_together > 1:
        monkeypatch.setattr(CountingEngine, "submit", submit_together)
    num_tokens, ways = 6000, {"short": 0, "long": 0}
    write, send = connection.PartWriter.write, RequestResponseCycle.send

    def count_write(self: connection.PartWriter, part: bytes) -> None:
        ways["short"] += 1
        write(self, part)

    async def count_send(self: RequestResponseCycle, message: Any) -> None:
        ways["long"] += 1
        await send(self, message)

    monkeypatch.setattr(connection.PartWriter, "write", count_write)
    monkeypatch.setattr(RequestResponseCycle, "send", count_send)
    engine_of(served).answer = lambda request: [5 + (index * 7 + index // 11) % 250 for index in range(num_tokens)]
    data = bytearray()
    with ask(served, num_tokens) as client:
        while b"[DONE]" not in data[-100:]:
            if len(data) < 8192 * 40:
                time.sleep(0.01)
            data += client.recv(8192)
    body = bytes(data).split(b"\r\n\r\n", 1)[1]
    events = events_of(body)
    streamed = "".join(event["choices"][0]["text"] for event in events)
    whole = json.loads(
        urllib.request.urlopen(
            urllib.request.Request(
                f"{served.url}/v1/completions",
                json.dumps({"prompt": [5], "max_tokens": num_tokens, "ignore_eos": True}).encode(),
                {"content-type": "application/json"},
            ),
            timeout=20,
        ).read()
    )
    assert streamed == whole["choices"][0]["text"]
    assert (len(events) < num_tokens * 0.9) == (num_together > 1), "what comes together is one chunk"
    assert ways["short"] > 100, ways
    assert ways["long"] > 3, "the start, the first text, the end, and more"


def events_of(body: bytes) -> list[Any]:
    """The events of a chunked body, without the last one."""
    joined = bytearray()
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        joined += rest[:length]
        body = rest[length + 2 :]
        if length == 0:
            break
    return [json.loads(line[6:]) for line in bytes(joined).split(b"\n\n") if line.startswith(b"data: {")]


def test_an_upgrade_to_another_protocol_breaks_nothing(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 ")
    assert "vllm:num_requests_running" in counts(served)
