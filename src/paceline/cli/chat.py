"""`paceline chat`: a conversation in the terminal against a server, which is started if no URL is given. HTTP only."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from paceline.config import AnswerConfig, ServerConfig, flag, settle_server, values
from paceline.errors import BadInputError, EngineDeadError, MissingError, PacelineError

_CONNECT_TIMEOUT_S = 5.0
_STOP_GRACE_S = 10.0
_POLL_INTERVAL_S = 0.1

Json = dict[str, Any]
Url = Annotated[str | None, Parameter(help="A server, such as http://127.0.0.1:8000; started on a free port if not given.")]


def chat(
    *,
    url: Url = None,
    config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
    answer: AnswerConfig = AnswerConfig(),  # noqa: B008 - frozen
) -> int:
    """Chat with a model in the terminal.

    An empty line or Ctrl-D ends; Ctrl-C stops an answer. The engine's and server's flags apply to a server started here.
    """
    if url is not None:
        return _converse(Connection(url), answer)
    with started_server(settle_server(replace(config, port=config.port if config.port != ServerConfig().port else 0))) as connection:
        return _converse(connection, answer)


class Connection:
    """An OpenAI-compatible server at a base URL, with or without `/v1`."""

    def __init__(self, url: str) -> None:
        """Raises BadInputError for what is not an http URL."""
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BadInputError(f"--url {url} is not an address like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """The id of the first model served there."""
        connection, response = self._send("GET", "/v1/models", None)
        with closing(connection):
            return str(json.loads(response.read())["data"][0]["id"])

    def stream(self, body: Json) -> Generator[Json]:
        """The chunks of a streamed chat completion; closing the iterator closes the connection, which aborts the request."""
        connection, response = self._send("POST", "/v1/chat/completions", body)
        with closing(connection):
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data.startswith("{"):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise EngineDeadError(f"{self.url} ended the answer: {chunk['error'].get('message', 'no reason given')}")
                    yield chunk

    def _send(self, method: str, path: str, body: Json | None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._kind(self._netloc, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer may be slow; connecting may not
            connection.request(method, self._base + path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise MissingError(f"no server answers at {self.url} ({error}); start one with `paceline serve`") from None
        if response.status != http.client.OK:
            text = response.read().decode(errors="replace")
            connection.close()
            raise BadInputError(f"{self.url} answered {response.status}: {_error_message(text)}")
        return connection, response


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


@contextmanager
def started_server(config: ServerConfig) -> Generator[Connection]:
    """Run `paceline serve` as a child for the block; its output goes to stderr. Raises what made it end early."""
    port = config.port or _free_port()
    command = [sys.executable, "-m", "paceline.cli", "serve", *as_flags(replace(config, port=port))]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)  # so that the child is stopped below
    # A session of its own: Ctrl-C in the terminal stops an answer here, and must not stop the server.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    connection = Connection(f"http://127.0.0.1:{port}")
    try:
        while True:
            code = child.poll()
            if code is not None:
                raise _StartError(code)
            try:
                connection.model()
                break
            except PacelineError:
                time.sleep(_POLL_INTERVAL_S)
        yield connection
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


class _StartError(PacelineError):
    """The started server ended; its exit code becomes ours."""

    def __init__(self, code: int) -> None:
        super().__init__("the server could not start; its message stands above")
        self.exit_code = code


def as_flags(config: ServerConfig) -> list[str]:
    """The command line that gives this configuration."""
    usual = values(ServerConfig())
    changed = {name: value for name, value in values(config).items() if value != usual[name]}
    return [f"{flag(name)}={str(value).lower() if isinstance(value, bool) else value}" for name, value in changed.items()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _converse(connection: Connection, answer: AnswerConfig) -> int:
    model = connection.model()
    print(f"{model} at {connection.url}; an empty line ends, Ctrl-C stops an answer")
    messages: list[Json] = []
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            text = ""
        if not text:
            return 0
        messages.append({"role": "user", "content": text})
        reply = _answer(connection, {**values(answer), "model": model, "messages": messages})
        messages.append({"role": "assistant", "content": reply})


def _answer(connection: Connection, body: Json) -> str:
    """Print one answer as it comes, then its speed; returns its text, cut short by Ctrl-C."""
    pieces: list[str] = []
    started_s = time.monotonic()
    last: Json = {}
    stream = connection.stream({**body, "stream": True, "stream_options": {"include_usage": True}})
    try:
        for chunk in stream:
            last = chunk
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                pieces.append(piece)
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        stream.close()
    print(f"\n{_speed(last, time.monotonic() - started_s)}", file=sys.stderr)
    return "".join(pieces)


def _speed(last: Json, elapsed_s: float) -> str:
    """One line on an answer from its last chunk; an answer that was stopped has no counts."""
    usage: Json | None = last.get("usage")
    if not usage:
        return f"[{elapsed_s:.1f} s]"
    line = f"{usage['completion_tokens']} tokens in {elapsed_s:.1f} s, {usage['completion_tokens'] / elapsed_s:.1f} tok/s"
    metrics: Json = last.get("metrics") or {}
    spec: Json | None = metrics.get("speculative_decoding")
    return f"[{line}, acceptance length {spec['mean_acceptance_length']:.2f}]" if spec else f"[{line}]"
