"""`paceline chat` against a scripted HTTP server, and the command line it would start one with."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.cli.chat import Connection, as_flags
from paceline.cli.main import run
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import BadInputError, EngineDeadError, MissingError


class ScriptedServer(ThreadingHTTPServer):
    """Answers every chat request with the same events, and keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.bodies: list[dict] = []
        self.events: list[str] = []
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class ScriptedHandler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer("".join(f"data: {event}\n\n" for event in self.server.events))

    def answer(self, text: str) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def event(content: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": content}}]})


LAST = json.dumps(
    {
        "choices": [],
        "usage": {"completion_tokens": 3},
        "metrics": {"speculative_decoding": {"mean_acceptance_length": 2.5}},
    }
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        scripted.events = [event("Hel"), event("lo"), LAST, "[DONE]"]
        thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    waiting = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(waiting))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_conversation_is_carried_along(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    say(monkeypatch, "Hi", "Again", "")
    assert run(["chat", "--url", server.url + suffix, "--max-tokens", "9"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Hello") == 2
    assert captured.err.count("3 tokens in") == 2
    assert "acceptance length 2.50" in captured.err
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert server.bodies[1]["messages"][1]["content"] == "Hello"
    assert server.bodies[0] | {"max_tokens": 9, "model": "tiny", "stream": True, "temperature": 0.0} == server.bodies[0]


def test_the_end_of_input_ends(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert run(["chat", "--url", server.url]) == 0
    assert server.bodies == []


def test_an_error_in_the_stream_ends_with_its_reason(server: ScriptedServer) -> None:
    server.events = [event("Hel"), json.dumps({"error": {"message": "the engine died"}})]
    with pytest.raises(EngineDeadError, match="the engine died"):
        list(Connection(server.url).stream({}))


def test_a_refusal_shows_the_servers_words(server: ScriptedServer) -> None:
    server.status, server.events = 400, []
    with pytest.raises(BadInputError, match="answered 400"):
        Connection(server.url).model()


def test_nobody_there(capsys: pytest.CaptureFixture[str], server: ScriptedServer) -> None:
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    assert run(["chat", "--url", f"127.0.0.1:{port}"]) == 3
    assert "paceline serve" in capsys.readouterr().err
    with pytest.raises(MissingError):
        Connection(server.url).model()


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="--url"):
        Connection(url)


def test_a_started_server_gets_the_flags_that_were_given() -> None:
    assert as_flags(ServerConfig()) == []
    given = ServerConfig(EngineConfig(model="x", max_draft_length=3, enable_prefix_caching=False), port=9)
    assert as_flags(given) == ["--model=x", "--max-draft-length=3", "--enable-prefix-caching=false", "--port=9"]


def test_a_server_that_cannot_start_gives_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--model", "no-such-model"]) == 2
    assert "no model 'no-such-model'" in capfd.readouterr().err
