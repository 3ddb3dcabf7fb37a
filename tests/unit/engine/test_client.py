"""The engine as a real child process: streams, aborts, refusals while loading, and what its death looks like from here."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import uvloop

from paceline.config import EngineConfig
from paceline.core.outcome import TokenDelta
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.engine import wire
from paceline.engine.client import DeltaSink, EngineClient, _Inbox
from paceline.engine.process import EngineProcess
from paceline.errors import BadInputError, EngineDeadError, MissingError
from tests.fakes.tiny_models import make_tiny_model

CONFIG = EngineConfig(dtype="float32", threads=1, kv_cache_memory_bytes=32 << 20)
LONG = SamplingParams(400, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=320)


@pytest_asyncio.fixture
async def client(folder: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(CONFIG, folder)
    yield client
    await client.close()


def request(request_id: str, sampling: SamplingParams = LONG) -> Request:
    return Request(request_id, (5, 6, 7, 8), sampling, time.monotonic())


async def collect(client: EngineClient, request: Request) -> list[TokenDelta]:
    return [delta async for delta in client.submit(request)]


async def test_concurrent_requests_end_with_exactly_one_reason(client: EngineClient) -> None:
    short = replace(LONG, max_tokens=20)
    results = await asyncio.gather(*(collect(client, request(f"r{i}", short)) for i in range(6)))
    for deltas in results:
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
        assert sum(len(delta.token_ids) for delta in deltas) == 20
    assert len({tuple(token for delta in deltas for token in delta.token_ids) for deltas in results}) == 1


async def test_closing_the_stream_aborts_and_frees_pages(client: EngineClient) -> None:
    stream = client.submit(request("gone"))
    await anext(stream)
    await stream.aclose()
    for _ in range(100):
        await asyncio.sleep(0.05)
        if client.stats().time_s > 0 and client.stats().num_running == 0:
            break
    assert client.stats().num_free_pages == client.stats().num_pages > 0


async def test_a_prompt_that_cannot_run_ends_with_an_error_delta(client: EngineClient) -> None:
    too_long = Request("long", tuple([5] * 600), LONG, time.monotonic())
    deltas = await collect(client, too_long)
    assert deltas[-1].finish_reason is FinishReason.ERROR and "600" in (deltas[-1].error or "")
    assert (await collect(client, request("after", replace(LONG, max_tokens=2))))[-1].finish_reason is FinishReason.LENGTH


async def test_death_raises_in_every_stream(folder: Path) -> None:
    client = await EngineClient.start(CONFIG, folder)
    stream = client.submit(request("r"))
    await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    assert not client.is_alive
    with pytest.raises(EngineDeadError):
        await collect(client, request("later"))
    await client.close()


async def test_refusals_while_loading_arrive_as_themselves(folder: Path) -> None:
    with pytest.raises(BadInputError, match="max-model-len"):
        await EngineClient.start(replace(CONFIG, max_model_len=100_000), folder)


async def test_close_leaves_no_process_and_no_directory(folder: Path) -> None:
    client = await EngineClient.start(CONFIG, folder)
    pid, directory = client.pid, client._process.directory
    await client.close()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


async def test_a_process_that_was_spawned_before_is_used_and_ended(folder: Path) -> None:
    with EngineProcess() as process:
        process.spawn(CONFIG.threads)
        pid = process.pid
        client = await EngineClient.start(CONFIG, folder, process=process)
        assert client.pid == pid
        assert (await collect(client, request("r", replace(LONG, max_tokens=2))))[-1].finish_reason is FinishReason.LENGTH
        await client.close()
        assert not psutil.pid_exists(pid)
    assert not process.directory.exists()


def test_a_process_ends_with_its_block() -> None:
    with EngineProcess() as process:
        process.spawn(None)
        assert process.exit_code() is None
    assert not psutil.pid_exists(process.pid)
    assert not process.directory.exists()


async def test_a_request_right_after_the_death_does_not_hang(folder: Path) -> None:
    client = await EngineClient.start(CONFIG, folder)
    os.kill(client.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)  # dead, but not yet looked at
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(collect(client, request("r")), 5)
    await client.close()


async def test_an_engine_that_ends_before_it_connects_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineDeadError, match="ended with status 1"):
        await asyncio.wait_for(EngineClient.start(CONFIG, folder), 30)


async def test_a_socket_path_that_is_too_long_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(MissingError, match="TMPDIR"):
        await EngineClient.start(CONFIG, folder)
    assert not list(deep.iterdir())


async def test_an_engine_whose_parent_is_gone_ends(folder: Path) -> None:
    """The parent here is a process that starts an engine on `folder` and is killed."""
    code = "\n".join(
        (
            "import asyncio",
            "from pathlib import Path",
            "from paceline.config import EngineConfig",
            "from paceline.engine.client import EngineClient, _Inbox",
            "async def main():",
            f"    client = await EngineClient.start(EngineConfig(threads=1), Path({str(folder)!r}))",
            "    print(client.pid, flush=True)",
            "    await asyncio.sleep(60)",
            "asyncio.run(main())",
        )
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    parent.kill()
    await parent.wait()
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return
        await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the engine outlived its parent")


async def test_a_sink_takes_what_comes_while_the_reader_waits() -> None:
    """Only then: what the reader has not read yet comes first. A fault of the sink is its own reader's."""
    taken: list[TokenDelta] = []
    deltas = [TokenDelta("a", (number,)) for number in range(6)]

    def sink(delta: TokenDelta, more: Sequence[TokenDelta]) -> bool:
        if delta is deltas[3]:
            return False
        if delta is deltas[5]:
            raise ValueError("it is broken")
        taken.extend((delta, *more))
        return True

    inbox = _Inbox(sink)
    inbox.put(deltas[0])
    assert inbox.deltas.popleft() is deltas[0], "nobody waited"
    arrival = inbox.arrival()
    inbox.put(deltas[1], deltas[2:3])
    inbox.put(deltas[3], deltas[4:5])
    assert arrival.done()
    assert (taken, list(inbox.deltas)) == (deltas[1:3], deltas[3:5])
    inbox.deltas.clear()
    arrival = inbox.arrival()
    inbox.put(deltas[5])
    await arrival
    assert isinstance(inbox.deltas[0], ValueError)


async def test_steps_that_wait_are_handed_out_as_one_and_new_requests_come_first() -> None:
    """Each request's tokens in their order, its end by itself."""
    taken: dict[str, list[tuple[int, ...]]] = {}
    order: list[str] = []

    def sink_of(request_id: str) -> DeltaSink:
        def sink(delta: TokenDelta, more: Sequence[TokenDelta]) -> bool:
            order.append(request_id)
            taken.setdefault(request_id, []).append(tuple(token_id for each in (delta, *more) for token_id in each.token_ids))
            return delta.finish_reason is None

        return sink

    process = EngineProcess()
    client = EngineClient(process)
    try:
        inboxes = client._queues = {name: _Inbox(sink_of(name)) for name in ("old", "ending", "new")}
        arrivals = [inbox.arrival() for inbox in inboxes.values()]
        await client._hand_out([[TokenDelta("old", (1,)), TokenDelta("ending", (1,))]])
        assert (order, taken) == (["old", "ending"], {"old": [(1,)], "ending": [(1,)]})
        order.clear()
        steps = [
            [TokenDelta("old", (2,)), TokenDelta("ending", (2,)), TokenDelta("gone", (2,))],
            [TokenDelta("old", (3, 4)), TokenDelta("ending", (3,)), TokenDelta("new", (1,))],
            [TokenDelta("old", (5,)), TokenDelta("ending", (4,), FinishReason.LENGTH), TokenDelta("new", (2,))],
        ]
        await client._hand_out(steps)
        assert order == ["new", "old", "ending", "ending"]
        assert taken == {"old": [(1,), (2, 3, 4, 5)], "ending": [(1,), (2, 3), (4,)], "new": [(1, 2)]}
        assert [arrival.done() for arrival in arrivals] == [False, True, False]
        assert list(inboxes["ending"].deltas) == [steps[2][1]]
    finally:
        await client.close(grace_s=0.0)


async def test_a_step_of_several_frames_is_handed_out_whole() -> None:
    """In its order, and each delta by itself: only of a reader that is behind does a stream get several as one."""
    taken: list[tuple[TokenDelta, ...]] = []
    is_whole = asyncio.Event()
    process = EngineProcess()
    client = EngineClient(process)
    client._bind()
    port = wire.EnginePort(str(process.directory))
    reading = asyncio.create_task(client._read())
    try:
        steps = [[TokenDelta(f"r{row}", (number,)) for row in range(300)] for number in (1, 2)]

        def sink(delta: TokenDelta, more: Sequence[TokenDelta]) -> bool:
            taken.append((delta, *more))
            if delta.request_id == "r299":
                is_whole.set()
            return True

        inboxes = client._queues = {delta.request_id: _Inbox(sink) for delta in steps[0]}
        arrivals = [inbox.arrival() for inbox in inboxes.values()]
        for step in steps:
            port.send_deltas(step)
            await asyncio.wait_for(is_whole.wait(), 10)
            is_whole.clear()
        assert taken == [(delta,) for step in steps for delta in step]
        assert not any(arrival.done() for arrival in arrivals)
    finally:
        reading.cancel()
        port.close()
        await client.close(grace_s=0.0)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_comes_to_a_socket_is_answered_before_the_next_slice(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape of /metrics that arrives while a step is handed out waits for the slice at hand and for no other."""
    monkeypatch.setattr("paceline.engine.client._SLICE_S", 0.0)  # every delta is a slice
    uvloop.run(_hand_out_beside_a_scrape(num_steps))


async def _hand_out_beside_a_scrape(num_steps: int) -> None:
    handed: list[str] = []
    handed_at_answer: list[int] = []
    ours, theirs = socket.socketpair()

    async def answer() -> None:
        handed_at_answer.append(len(handed))

    class Server(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            self.task = asyncio.create_task(answer())

    def sink(delta: TokenDelta, more: Sequence[TokenDelta]) -> bool:
        handed.append(delta.request_id)
        if delta.request_id == "r3":
            theirs.send(b"GET /metrics")
        return True

    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(Server, ours)
    client = EngineClient(EngineProcess())
    try:
        inboxes = client._queues = {f"r{row}": _Inbox(sink) for row in range(8)}
        arrivals = [inbox.arrival() for inbox in inboxes.values()]
        await client._hand_out([[TokenDelta(name, (number,)) for name in inboxes] for number in range(num_steps)])
        assert len(handed) == len(inboxes) and not any(arrival.done() for arrival in arrivals)
        assert handed_at_answer == [4]
    finally:
        transport.close()
        theirs.close()
        await client.close(grace_s=0.0)


async def test_an_engine_that_ends_is_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last tokens reach their readers and its own reason is told, although the process is seen to have ended while they are read."""
    monkeypatch.setattr("paceline.engine.client._SLICE_S", 0.0)  # every delta is a slice
    monkeypatch.setattr("paceline.engine.client._WATCH_INTERVAL_S", 0.0)
    process = EngineProcess()
    client = EngineClient(process)
    client._bind()
    port = wire.EnginePort(str(process.directory))
    names = [f"r{row}" for row in range(300)]
    inboxes = client._queues = {name: _Inbox(None) for name in names}
    has_ended = False
    monkeypatch.setattr(EngineProcess, "exit_code", lambda self: 1 if has_ended else None)
    by_request = client._by_request

    async def ending(steps: Sequence[Sequence[TokenDelta]]) -> object:
        nonlocal has_ended
        has_ended = True
        return await by_request(steps)

    monkeypatch.setattr(client, "_by_request", ending)
    tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._watch())]
    try:
        port.send_deltas([TokenDelta(name, (1,)) for name in names])
        port.send(wire.Failed("out of memory", 1))
        await asyncio.wait_for(tasks[1], 10)
        assert client._death == "out of memory"
        assert [list(inbox.deltas)[:2] for inbox in inboxes.values()] == [[TokenDelta(name, (1,)), None] for name in names]
    finally:
        for task in tasks:
            task.cancel()
        port.close()
        await client.close(grace_s=0.0)
