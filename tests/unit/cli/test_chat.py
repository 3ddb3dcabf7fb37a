"""`paceline chat` against a scripted HTTP server, and the command line it would start one with."""

import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from paceline.cli import chat, child_server
from paceline.cli.chat import Connection, as_flags, started_server
from paceline.cli.main import run
from paceline.config import EngineConfig, ServerConfig, values
from paceline.errors import BadInputError, EngineDeadError, MissingError
from tests.fakes.tiny_models import make_tiny_model


class ScriptedServer(ThreadingHTTPServer):
    """Answers every chat request with the same events, and keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.bodies: list[dict] = []
        self.events: list[str] = []
        self.models = json.dumps({"data": [{"id": "tiny"}]})
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class ScriptedHandler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.answer(self.server.models)

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


@pytest.mark.parametrize(("status", "error"), [(400, BadInputError), (404, BadInputError), (500, MissingError), (503, MissingError)])
def test_a_refusal_shows_the_servers_words(server: ScriptedServer, status: int, error: type[Exception]) -> None:
    server.status = status
    server.models = json.dumps({"error": {"message": "not like this"}})
    with pytest.raises(error, match=f"answered {status}: not like this"):
        Connection(server.url).model()
    server.models = "<html>"
    with pytest.raises(error, match=f"answered {status}: <html>"):
        Connection(server.url).model()


@pytest.mark.parametrize(
    "models", ["", "<html>", "[]", "5", '{"data": []}', '{"data": [5]}', '{"data": {"id": "x"}}', '{"object": "list"}']
)
def test_a_server_of_another_kind_is_said_to_be_one(server: ScriptedServer, capsys: pytest.CaptureFixture[str], models: str) -> None:
    server.models = models
    assert run(["chat", "--url", server.url]) == 2
    assert "does not speak as OpenAI's interface does" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["{", '{"choices": 5}', '{"choices": [{}]}', '{"choices": [{"delta": []}]}', '{"choices": [{"delta": {"content": 5}}]}', "{}"]
)
def test_so_is_one_whose_chunks_have_another_form(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    server.events = [line]
    say(monkeypatch, "Hi")
    assert run(["chat", "--url", server.url]) == 2
    assert "does not speak as OpenAI's interface does" in capsys.readouterr().err


@pytest.mark.parametrize("error", ['"gone"', "5", '{"code": 1}'])
def test_an_error_in_another_form_is_still_an_error(server: ScriptedServer, error: str) -> None:
    server.events = ['{"error": ' + error + "}"]
    with pytest.raises(EngineDeadError, match="ended the answer"):
        list(Connection(server.url).stream({}))


def test_an_answer_without_its_end_is_an_error(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that dies closes its connections, which must not look like a short answer."""
    server.events = [event("Hel")]
    say(monkeypatch, "Hi")
    assert run(["chat", "--url", server.url]) == 3
    captured = capsys.readouterr()
    assert "Hel" in captured.out
    assert "ended its answer before the end" in captured.err


@pytest.mark.parametrize("usage", [None, {}, {"total_tokens": 5}])
def test_an_answer_without_counts_still_counts_time(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], usage: object
) -> None:
    server.events = [event("Hello"), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
    say(monkeypatch, "Hi", "")
    assert run(["chat", "--url", server.url]) == 0
    assert " s]" in capsys.readouterr().err


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
RAW_ANSWERS = [
    (b"", 3, "no server answers"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", 2, "does not answer in HTTP"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", 3, "broke off its answer"),
    (CHUNKED + b"zz\r\n", 3, "broke off its answer"),
    (CHUNKED + b"9\r\n{", 3, "broke off its answer"),
]


@pytest.mark.parametrize(("answer", "code", "words"), RAW_ANSWERS)
def test_what_a_foreign_or_dying_server_sends(capsys: pytest.CaptureFixture[str], answer: bytes, code: int, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert run(["chat", "--url", f"127.0.0.1:{listener.getsockname()[1]}"]) == code
        thread.join()
    message = capsys.readouterr().err
    assert words in message
    assert "internal error" not in message


def test_nobody_there(capsys: pytest.CaptureFixture[str], server: ScriptedServer) -> None:
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    assert run(["chat", "--url", f"127.0.0.1:{port}"]) == 3
    assert "paceline serve" in capsys.readouterr().err
    with pytest.raises(MissingError):
        Connection(server.url).model()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "", "http://[::1", "http://x:port", "http://x:0", "http://x:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="--url"):
        Connection(url)


def test_a_started_server_gets_the_flags_that_were_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them: the variables that are set for this program are set for the server too, and flags are stronger."""
    given = ServerConfig(EngineConfig(model="x", max_draft_length=3, enable_prefix_caching=False), port=9)
    assert {"--model=x", "--max-draft-length=3", "--enable-prefix-caching=false", "--port=9", "--max-batch-size=256"} <= {*as_flags(given)}
    monkeypatch.setenv("PACELINE_MAX_BATCH_SIZE", "8")
    assert run(["config", "show", *as_flags(given)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == values(given)


def test_a_started_server_is_asked_where_it_listens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On the host that was asked for, at a port that it took itself; its output shows, and it ends with the chat."""
    folder = make_tiny_model(tmp_path / "tiny")
    seen: list[Connection] = []

    class Seen(Connection):
        def __init__(self, url: str) -> None:
            super().__init__(url)
            seen.append(self)

    monkeypatch.setattr(chat, "Connection", Seen)
    say(monkeypatch, "Hi", "")
    arguments = [
        "--model",
        str(folder),
        "--host",
        "127.0.0.2",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "4000000",
    ]
    assert run(["chat", *arguments, "--max-tokens", "4"]) == 0
    captured = capfd.readouterr()
    assert "tiny at http://127.0.0.2:" in captured.out
    assert "Paceline is ready on http://127.0.0.2:" in captured.err
    assert "4 tokens in" in captured.err
    address = urllib.parse.urlsplit(seen[0].url)
    with socket.socket() as probe:
        assert probe.connect_ex((str(address.hostname), address.port or 0)) != 0, "the server is still there"


def test_a_server_that_is_never_ready_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_server, "_START_LIMIT_S", 0.1)
    with pytest.raises(MissingError, match="was not ready after"), started_server(ServerConfig(port=0)):
        pass


def test_a_server_that_cannot_start_gives_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--model", "no-such-model"]) == 2
    assert "no model 'no-such-model'" in capfd.readouterr().err
