"""A real socket: the openai client, the ready line, ports that are taken, signals, and an end that ends every stream."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from paceline.config import ServerConfig
from paceline.errors import BadInputError, EngineDeadError, MissingError
from paceline.server import run
from paceline.server.run import bind_socket, run_server
from tests.fakes.fake_engine import FakeEngine, Faults
from tests.fakes.served import Served

MESSAGES: list[Any] = [{"role": "user", "content": "say it"}]
TEXT = "the quick brown fox 😀 jumps"


def urlopen_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture(scope="module")
def served(folder: Path, tokenizer: Tokenizer) -> Iterator[Served]:
    token_ids = tokenizer.encode(TEXT).ids

    def engine() -> FakeEngine:
        return FakeEngine(answer=lambda _: [*token_ids, 2], chunk=3, faults=Faults(step_s=0.002))

    with Served(engine, folder, ServerConfig(served_model_name="tiny")) as served:
        yield served


def test_openai_client_chat(served: Served) -> None:
    with served.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=50, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_stream(served: Served) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    metrics: Any = (chunks[-1].model_extra or {})["metrics"]
    assert metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_openai_client_token_id_prompt(served: Served) -> None:
    with served.client() as client:
        answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=50)
        several = client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=50)
    assert answer.choices[0].text == TEXT
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert [choice.index for choice in several.choices] == [0, 1]


def test_openai_client_stop(served: Served) -> None:
    with served.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=50, stop=["own f", "zzz"])
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=50, stop="own f", stream=True)
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert answer.choices[0].message.content == text == TEXT[: TEXT.index("own f")]
    assert answer.choices[0].finish_reason == "stop"


def test_openai_client_meets_the_limits(folder: Path) -> None:
    """A late stream ends with a reason of its own; over the limit of requests the client sees a 503 that it may retry."""
    config = ServerConfig(warmup=False, request_timeout=0.5, max_concurrent_requests=1)
    with Served(lambda: FakeEngine(faults=Faults(hang_after=3)), folder, config) as served, served.client() as client:
        stream = client.completions.create(model="fake", prompt=[5, 6, 7, 8, 9], stream=True)
        first = next(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="fake", prompt=[5])
        assert (refused.value.status_code, refused.value.code) == (503, "busy")
        assert refused.value.response.headers["retry-after"] == "1"
        chunks = [first, *stream]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "timeout"]
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(model="fake", prompt=[5, 6, 7, 8, 9])
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        assert served.engine.num_active == 0


def test_openai_client_errors(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="gpt-5", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert unknown.value.code == "model_not_found"
    assert bad.value.param == "temperature"


def test_openai_client_that_breaks_off_aborts(served: Served) -> None:
    with served.client() as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        request_id = served.engine.requests[-1].request_id
        stream.close()
    deadline = threading.Event()
    for _ in range(200):
        if request_id in served.engine.aborted:
            break
        deadline.wait(0.01)
    assert request_id in served.engine.aborted


def test_openai_client_lists_models(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"


def test_the_engines_death_raises_in_the_openai_client(folder: Path) -> None:
    """A stream that breaks must be an exception there, not a short answer."""
    with Served(lambda: FakeEngine(faults=Faults(die_after=4)), folder, ServerConfig(warmup=False)) as served, served.client() as client:
        stream = client.completions.create(model="fake", prompt=[5, 6, 7, 8, 9, 10], stream=True)
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)


def test_after_the_engines_death_the_server_ends_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before probes and running clients have seen it; with the exit status that makes a process manager start it again."""
    monkeypatch.setattr(run, "_DEATH_GRACE_S", 1.0)
    engine = FakeEngine(faults=Faults(hang_after=2))
    with Served(lambda: engine, folder, ServerConfig(warmup=False)) as served, served.client() as client:
        stream = iter(client.completions.create(model="fake", prompt=[5, 6, 7, 8], stream=True))
        next(stream)
        served.loop.call_soon_threadsafe(engine.kill)
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)
        assert urlopen_status(f"{served.url}/health") == urlopen_status(f"{served.url}/ready") == 503
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="fake", prompt=[5])
        assert (refused.value.status_code, refused.value.code) == (503, "engine_dead")
        assert served.error is None
        served.thread.join(5)
        assert not served.thread.is_alive()
    assert isinstance(served.error, EngineDeadError)
    assert served.error.exit_code == 3


def test_a_client_that_hangs_does_not_hold_a_server_whose_engine_died(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_DEATH_GRACE_S", 0.2)
    monkeypatch.setattr(run, "_LAST_EVENTS_S", 1)
    engine = FakeEngine()
    upload = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with Served(lambda: engine, folder, ServerConfig(warmup=False, shutdown_timeout=60)) as served, served.connect() as client:
        client.sendall(upload)
        served.loop.call_soon_threadsafe(engine.kill)
        served.thread.join(5)
        assert not served.thread.is_alive()
    assert isinstance(served.error, EngineDeadError)


def test_what_clients_send_does_not_fill_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for request, status in ((upgrade, b"HTTP/1.1 200"), (b"nonsense\r\n\r\n", b"HTTP/1.1 400")):
        with served.connect() as client:
            client.sendall(request)
            assert client.recv(100).startswith(status)
    assert not caplog.records


def test_the_ready_line_is_a_command_that_works(served: Served) -> None:
    """One line; what follows `try:` runs in a shell as it stands."""
    assert len(served.lines) == 1
    words = shlex.split(served.lines[0].split("try: ")[1])
    assert words[0] == "curl"
    body = json.loads(words[words.index("-d") + 1])
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    with served.client() as client:
        answer = client.post(words[1], body=body, cast_to=object)
    assert answer["choices"][0]["message"]["content"] == TEXT  # type: ignore[index]


def test_warm_up_failure_is_no_ready_line(folder: Path) -> None:
    async def start() -> None:
        with bind_socket("127.0.0.1", 0) as listener:
            await run_server(FakeEngine(faults=Faults(fail_after=0)), ServerConfig(), folder, listener, lines.append)

    lines: list[str] = []
    with pytest.raises(EngineDeadError, match="did not warm up"):
        asyncio.run(start())
    assert lines == []


def test_a_taken_port_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MissingError, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port") as caught:
            bind_socket("127.0.0.1", port)
    assert caught.value.exit_code == 3


def test_a_port_taken_after_binding_says_so_too(folder: Path) -> None:
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with bind_socket("127.0.0.1", port) as rival:
        rival.listen()
        with pytest.raises(MissingError, match="is taken"):
            asyncio.run(run_server(FakeEngine(), ServerConfig(port=port), folder, listener, lambda _: None))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(BadInputError) as caught:
        bind_socket(host, 0)
    assert caught.value.exit_code == 2


def test_a_bound_socket_does_not_accept_yet() -> None:
    with bind_socket("127.0.0.1", 0) as listener, socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) != 0


PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from paceline.config import ServerConfig
    from paceline.server.run import bind_socket, run_server
    from tests.fakes.fake_engine import FakeEngine, Faults

    async def main():
        engine = FakeEngine(faults=Faults(step_s=float(sys.argv[3])))
        config = ServerConfig(warmup=False, shutdown_timeout=float(sys.argv[2]))
        await run_server(engine, config, Path(sys.argv[1]), bind_socket("127.0.0.1", 0))
        print("tidy", engine.num_active, flush=True)

    asyncio.run(main())
    """
)


class Program:
    """A server as a process of its own, for signals."""

    def __init__(self, folder: Path, shutdown_timeout_s: float, step_s: float) -> None:
        arguments = [sys.executable, "-c", PROGRAM, str(folder), str(shutdown_timeout_s), str(step_s)]
        root = Path(__file__).parents[3]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[4]

    def stream(self) -> Any:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)
        return client.completions.create(model="fake", prompt=[5] * 20, max_tokens=20, stream=True)

    def end(self, number: int) -> None:
        self.process.send_signal(number)

    def result(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output.strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish(folder: Path, number: int) -> None:
    program = Program(folder, shutdown_timeout_s=15, step_s=0.02)
    stream = iter(program.stream())
    next(stream)
    program.end(number)
    assert len([chunk for chunk in stream if chunk.choices[0].text]) >= 1
    assert program.result() == (0, "tidy 0")


def test_after_the_time_limit_streams_end_with_an_error(folder: Path) -> None:
    program = Program(folder, shutdown_timeout_s=0.2, step_s=1.0)
    stream = iter(program.stream())
    next(stream)
    program.end(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert program.result() == (0, "tidy 0")


def test_a_second_signal_ends_them_at_once(folder: Path) -> None:
    program = Program(folder, shutdown_timeout_s=60, step_s=1.0)
    stream = iter(program.stream())
    next(stream)
    program.end(signal.SIGINT)
    threading.Event().wait(0.5)
    program.end(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert program.result() == (0, "tidy 0")
