"""One streamed chat completion of any OpenAI server, as facts: when each token came, how many, how it ended. Called by `load.py`.

Never raises for what a server does: an answer that is not whole is an answer with an error. Work per chunk is a read of the clock and one
typed decode, for the process that measures must not be what is measured.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from paceline.errors import BadInputError, MissingError
from paceline.prove.acceptance import read_acceptance
from paceline.prove.record import Acceptance
from paceline.prove.sse import BrokenStreamError, Events

MAX_BODY_BYTES = 16 * 1024 * 1024  # of anything but a stream
MAX_STREAM_BYTES = 256 * 1024 * 1024
MAX_ERROR_CHARS = 500
CONNECT_TIMEOUT_S = 10.0
WHOLE_REASONS = ("stop", "length")
NO_USAGE = "the answer came without usage"  # nothing else is wrong with it
_ROUTE = "/v1/chat/completions"

Message = dict[str, str]
_encode = msgspec.json.encode


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None  # of models that think aloud, in two spellings
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # vLLM's, with `return_token_ids`
    speculative_decoding: msgspec.Raw = msgspec.Raw(b"")


class _Event(msgspec.Struct, frozen=True):
    """What is looked at in an event; the rest is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")
    metrics: msgspec.Raw = msgspec.Raw(b"")
    sglext: msgspec.Raw = msgspec.Raw(b"")
    timings: msgspec.Raw = msgspec.Raw(b"")


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `fields`: the body's fields beyond OpenAI's own, such as `max_draft_length`."""

    model: str
    messages: Sequence[Message]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    fields: Mapping[str, object] | None = None
    stream_options: Mapping[str, object] | None = None

    def body(self) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, **(self.stream_options or {})},
            **(self.fields or {}),
        }
        if self.seed is not None:
            fields["seed"] = self.seed
        return _encode(fields)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request; times as in RequestRecord."""

    sent_s: float
    end_s: float
    status: int  # HTTP status; 0 if there was no answer
    error: str | None  # None for an answer that is whole
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()  # empty where the server does not say
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""  # thoughts, then what was said
    content: str = ""  # what was said: the next turn's history
    token_ids: tuple[int, ...] = ()
    acceptance: Acceptance | None = None
    acceptance_fault: str | None = None  # why an account that came is not believed
    has_usage: bool = False
    has_chunk_usage: bool = False
    tells_cached_tokens: bool = False


class ChatClient:
    """Connections to one server. Use it as an async context manager."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """`base_url` with or without /v1. Raises BadInputError if it is none."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise BadInputError(f"{base_url!r} is no URL of a server; give one such as http://127.0.0.1:8000")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            headers=self._headers,
            trust_env=False,  # a proxy between would be measured too
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, ask: Ask) -> Answer:
        """Ask, and read the answer to its end."""
        assert self._session is not None, "entered"
        body, transcript = ask.body(), _Transcript()
        transcript.sent_s = time.monotonic()
        try:
            async with self._session.post(f"{self.base_url}{_ROUTE}", data=body, allow_redirects=False) as response:
                transcript.status = response.status
                if response.status != 200 or not response.content_type.startswith("text/event-stream"):
                    transcript.error = _refusal(response.status, await bounded_body(response.content))
                else:
                    await transcript.read(response.content)
        except (TimeoutError, aiohttp.ClientError, OSError, BrokenStreamError) as error:
            if not transcript.is_over:  # what breaks behind [DONE] is no loss
                transcript.error = _failure(error, self._timeout_s)
        return transcript.answer()

    async def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Status and body of another route. Raises MissingError if the server cannot be reached."""
        return await self._fetch("GET", path, b"", timeout_s)

    async def post(self, path: str, fields: Mapping[str, object], timeout_s: float = 60.0) -> tuple[int, bytes]:
        """The same with a JSON body."""
        return await self._fetch("POST", path, _encode(fields), timeout_s)

    async def _fetch(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        assert self._session is not None, "entered"
        try:
            async with asyncio.timeout(timeout_s):
                # No redirects: the key is for this server, and what is measured must be what was named.
                async with self._session.request(method, self.base_url + path, data=body or None, allow_redirects=False) as response:
                    return response.status, await bounded_body(response.content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise MissingError(
                f"{self.base_url}{path} does not answer: {_failure(error, timeout_s)}; start the server (paceline serve) or give its --url"
            ) from None


class _Transcript:
    """A stream as it comes."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.status = 0
        self.error: str | None = None
        self.is_over = False  # [DONE] came
        self._chunk_times_s: list[float] = []
        self._chunk_tokens: list[int | None] = []
        self._thoughts: list[str] = []
        self._contents: list[str] = []
        self._token_ids: list[int] = []
        self._usage: _Usage | None = None
        self._has_chunk_usage = False
        self._finish_reason: str | None = None
        self._accounts: dict[str, bytes] = {}

    async def read(self, content: aiohttp.StreamReader) -> None:
        events, num_bytes = Events(), 0
        async for data in content.iter_any():
            now_s = time.monotonic()
            num_bytes += len(data)
            if num_bytes > MAX_STREAM_BYTES:
                raise BrokenStreamError(f"the stream is longer than {MAX_STREAM_BYTES:,} bytes")
            for payload, is_error in events.feed(data):
                self._event(payload, is_error, now_s)
        now_s = time.monotonic()
        for payload, is_error in events.close():
            self._event(payload, is_error, now_s)

    def _event(self, payload: bytes, is_error: bool, now_s: float) -> None:
        if payload == b"[DONE]" or not payload:
            self.is_over = self.is_over or bool(payload)
            return
        if is_error:
            self.error = self.error or f"error event: {_message_of(payload)}"
            return
        try:
            event = _event_decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BrokenStreamError(f"an event of the stream cannot be read: {error}") from None
        if event.error and bytes(event.error) != b"null":
            self.error = self.error or f"error event: {_message_of(payload)}"
        num_known = self._usage.completion_tokens if self._usage is not None else 0
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.index == 0:
                self._choice(choice, event.usage, num_known, now_s)
        for name, account in (("metrics", event.metrics), ("sglext", event.sglext), ("timings", event.timings)):
            if account:
                self._accounts[name] = bytes(account)

    def _choice(self, choice: _Choice, usage: _Usage | None, num_known: int, now_s: float) -> None:
        delta = choice.delta
        thought = (delta.reasoning_content or delta.reasoning or "") if delta is not None else ""
        content = (delta.content or "") if delta is not None else ""
        if thought:
            self._thoughts.append(thought)
        if content:
            self._contents.append(content)
        num_tokens = None
        if choice.token_ids is not None:
            num_tokens = len(choice.token_ids)
            self._token_ids += choice.token_ids
        if usage is not None:
            self._has_chunk_usage = self._has_chunk_usage or choice.finish_reason is None
            if self._has_chunk_usage or not self._chunk_times_s:  # else it is the sum of all, told with the last of them
                num_tokens = usage.completion_tokens - num_known
        if num_tokens or (num_tokens is None and (thought or content)):
            self._chunk_times_s.append(now_s)
            self._chunk_tokens.append(num_tokens)
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        if choice.speculative_decoding:
            self._accounts["choice"] = bytes(choice.speculative_decoding)

    def answer(self) -> Answer:
        end_s = time.monotonic()
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details
        acceptance, fault = read_acceptance(*(self._accounts.get(name, b"") for name in ("metrics", "sglext", "choice", "timings")))
        return Answer(
            sent_s=self.sent_s,
            end_s=end_s,
            status=self.status,
            error=self.error or self._what_is_missing(),
            chunk_times_s=tuple(self._chunk_times_s),
            chunk_tokens=self._true_chunk_tokens(usage.completion_tokens),
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            num_output_tokens=usage.completion_tokens,
            finish_reason=self._finish_reason,
            text="".join(self._thoughts) + "".join(self._contents),
            content="".join(self._contents),
            token_ids=tuple(self._token_ids),
            acceptance=acceptance,
            acceptance_fault=fault,
            has_usage=self._usage is not None,
            has_chunk_usage=self._has_chunk_usage,
            tells_cached_tokens=details is not None and details.cached_tokens is not None,
        )

    def _true_chunk_tokens(self, num_output_tokens: int) -> tuple[int, ...]:
        """All or nothing: counts that are missing in places or do not add up would give wrong times per token."""
        counts = tuple(count for count in self._chunk_tokens if count is not None)
        is_true = len(counts) == len(self._chunk_tokens) and min(counts, default=1) > 0 and sum(counts) == num_output_tokens
        return counts if is_true else ()

    def _what_is_missing(self) -> str | None:
        """Why an answer without an error is yet not whole."""
        if self._finish_reason is None:
            return "the stream ended without a finish reason"
        if self._finish_reason not in WHOLE_REASONS:
            return f"the answer ended with finish reason {self._finish_reason[:100]!r}"
        if self._usage is None:
            return NO_USAGE
        return None


async def bounded_body(content: aiohttp.StreamReader) -> bytes:
    """A body, or its beginning if it is longer than MAX_BODY_BYTES."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            break
    return bytes(body)


def _refusal(status: int, body: bytes) -> str:
    if status == 200:
        return "the answer is no stream of events"
    return f"HTTP {status}: {_message_of(body)}"


def _message_of(body: bytes) -> str:
    """The message in an error answer, in the forms that servers have; else its beginning."""
    try:
        told: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        told = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and name in told:
            told = told[name]  # pyright: ignore[reportUnknownVariableType]
    return " ".join(str(told).split())[:MAX_ERROR_CHARS]  # pyright: ignore[reportUnknownArgumentType]


def _failure(error: Exception, timeout_s: float) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    if isinstance(error, BrokenStreamError):
        return str(error)
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the connection was cut"
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
