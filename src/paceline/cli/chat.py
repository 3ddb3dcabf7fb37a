"""`paceline chat`: a conversation in the terminal against a server, which is started if no URL is given. HTTP only."""

import http.client
import json
import sys
import time
import urllib.parse
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from paceline.cli.child_server import running_server
from paceline.config import AnswerConfig, ServerConfig, check_ranges, flag, settle_server, values
from paceline.errors import BadInputError, EngineDeadError, MissingError

_CONNECT_TIMEOUT_S = 5.0
_LIST_TIMEOUT_S = 30.0

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
    check_ranges(answer)
    if url is not None:
        return _converse(Connection(url), answer)
    with started_server(settle_server(replace(config, port=config.port if config.port != ServerConfig().port else 0))) as connection:
        return _converse(connection, answer)


class Connection:
    """An OpenAI-compatible server at a base URL, with or without `/v1`."""

    def __init__(self, url: str) -> None:
        """Raises BadInputError for what is not an http URL."""
        parts = _split(url)
        if parts is None:
            raise BadInputError(f"--url {url} is not an address like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """The id of the first model served there."""
        with self._response("GET", "/v1/models", None, _LIST_TIMEOUT_S) as response:
            text = response.read()
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise self._foreign("GET /v1/models lists no model") from None

    def stream(self, body: Json) -> Generator[Json]:
        """The chunks of a streamed chat completion; closing the iterator closes the connection, which aborts the request."""
        with self._response("POST", "/v1/chat/completions", body, None) as response:  # no time limit: an answer may be slow
            for line in response:
                data = line.decode(errors="replace").strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data.startswith("{"):
                    yield self._chunk(data)
        raise MissingError(f"{self.url} ended its answer before the end; its log may say why")

    def text_of(self, chunk: Json) -> str:
        """The new text in a chunk."""
        try:
            return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        except (LookupError, TypeError, AttributeError):
            raise self._foreign("a chunk of its answer has another form") from None

    def _chunk(self, data: str) -> Json:
        try:
            chunk: Json = json.loads(data)
        except ValueError:
            raise self._foreign("a line of its answer is not JSON") from None
        if chunk.get("error") is not None:
            raise EngineDeadError(f"{self.url} ended the answer: {_error_message(data)}")
        return chunk

    def _foreign(self, reason: str) -> BadInputError:
        return BadInputError(f"{self.url} does not speak as OpenAI's interface does: {reason}; give --url the address of such a server")

    @contextmanager
    def _response(self, method: str, path: str, body: Json | None, timeout_s: float | None) -> Generator[http.client.HTTPResponse]:
        """The answer to a request, to be read in the block.

        Raises MissingError if there is no server or it goes away, BadInputError if it refuses or is no HTTP server.
        """
        is_answering = False
        try:
            with closing(self._kind(self._netloc, timeout=_CONNECT_TIMEOUT_S)) as connection:
                connection.connect()
                connection.sock.settimeout(timeout_s)
                data = None if body is None else json.dumps(body)
                connection.request(method, self._base + path, data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                is_answering = True
                if response.status != http.client.OK:
                    self._refuse(response.status, response.read().decode(errors="replace"))
                yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            if is_answering:
                raise MissingError(f"{self.url} broke off its answer ({reason}); its log may say why") from None
            if isinstance(error, OSError):
                raise MissingError(f"no server answers at {self.url} ({reason}); start one with `paceline serve`") from None
            raise self._foreign(f"it does not answer in HTTP ({reason})") from None

    def _refuse(self, status: int, text: str) -> NoReturn:
        kind = MissingError if status >= http.client.INTERNAL_SERVER_ERROR else BadInputError
        raise kind(f"{self.url} answered {status}: {_error_message(text)}")


def _split(url: str) -> urllib.parse.SplitResult | None:
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:  # a bracket without its other half, a port that is no number
        return None


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


@contextmanager
def started_server(config: ServerConfig) -> Generator[Connection]:
    """Run `paceline serve` as a child for the block; its output goes to stderr. Raises what made it end early."""
    with running_server(as_flags(config), sys.stderr.write) as server:
        yield Connection(server.url)


def as_flags(config: ServerConfig) -> list[str]:
    """The command line that gives this configuration, whatever the environment says."""
    given = {name: value for name, value in values(config).items() if value is not None}
    return [f"{flag(name)}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]


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
            piece = connection.text_of(chunk)
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
    usage: Json = last.get("usage") or {}
    num_tokens = usage.get("completion_tokens")
    if not num_tokens:
        return f"[{elapsed_s:.1f} s]"
    line = f"{num_tokens} tokens in {elapsed_s:.1f} s, {num_tokens / elapsed_s:.1f} tok/s"
    metrics: Json = last.get("metrics") or {}
    spec: Json | None = metrics.get("speculative_decoding")
    return f"[{line}, acceptance length {spec['mean_acceptance_length']:.2f}]" if spec else f"[{line}]"
