"""The two ASGI answers of a generation: server-sent events, and one JSON body. Hand-written, because a chunk per step must be cheap.

Both watch the client while they work: one that leaves ends its generation at once. What breaks after a stream has begun becomes its
last event.
"""

import asyncio
import logging
from contextlib import aclosing
from enum import Enum, auto

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.outcome import TokenLogprobs
from paceline.errors import PacelineError
from paceline.metrics.requests import ErrorKind, RequestMetrics
from paceline.server.detokenize import ReportedToken
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight, InterruptedAnswerError, Interruption
from paceline.server.openai import answers
from paceline.server.openai.answers import Choice, Envelope
from paceline.server.openai.errors import ErrorAnswer, answer_for
from paceline.server.openai.logprobs import LogprobWriter, prompt_logprobs
from paceline.server.openai.requests import StreamOptions

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # a client that does not read gets no longer to take the last event
STOPPING = ErrorAnswer(
    503, ErrorKind.UNAVAILABLE, "the server is shutting down; send the request again", "server_error", code="shutting_down", retry_after_s=1
)

Headers = list[tuple[bytes, bytes]]


class _Phase(Enum):
    """How far an answer has got, which decides how an error can still be told."""

    NOTHING_SENT = auto()  # as an HTTP status
    STREAMING = auto()  # as an event
    ENDING = auto()  # not at all: the end is being sent


class GenerationResponse(Response):
    """Runs a generation inside the response, where the client can be watched. Subclasses say what is sent."""

    def __init__(self, generation: Generation, envelope: Envelope, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__()
        self._generation = generation
        self._envelope = envelope
        self._in_flight = in_flight
        self._metrics = metrics
        self._phase = _Phase.NOTHING_SENT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._in_flight.answering(receive):
                await self._answer(send)
        except InterruptedAnswerError as error:
            if error.reason is Interruption.SHUT_DOWN:
                await self._end_broken(STOPPING, send)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("request %s failed", self._generation.job.answer_id)
            else:
                _log.error("request %s failed: %s", self._generation.job.answer_id, error)
            await self._end_broken(answer_for(error), send)

    async def _answer(self, send: Send) -> None:
        raise NotImplementedError

    async def _end_broken(self, error: ErrorAnswer, send: Send) -> None:
        self._metrics.error(error.kind)
        phase, self._phase = self._phase, _Phase.ENDING
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if phase is _Phase.NOTHING_SENT:
                    await send_error(send, error)
                elif phase is _Phase.STREAMING:
                    await _send_body(send, answers.error_event(error.body), more=False)
        except TimeoutError:
            _log.warning("request %s: the client did not read the error", self._generation.job.answer_id)


class StreamResponse(GenerationResponse):
    """Server-sent events: a chunk for each step that made text, then usage if asked for, then [DONE].

    The response begins with the first text, so that what fails before it still gets its own HTTP status.
    """

    def __init__(
        self,
        generation: Generation,
        envelope: Envelope,
        in_flight: InFlight,
        metrics: RequestMetrics,
        options: StreamOptions,
    ) -> None:
        super().__init__(generation, envelope, in_flight, metrics)
        self._options = options

    async def _answer(self, send: Send) -> None:
        envelope, generation = self._envelope, self._generation
        opened: set[int] = set()
        logprobs = LogprobWriter(generation.vocabulary, envelope.is_chat)
        async with aclosing(generation.run()) as deltas:
            async for index, delta in deltas:
                chunk = b""
                if index not in opened:
                    opened.add(index)
                    chunk = envelope.first_chunk(index)
                if delta.text or delta.finish_reason is not None or delta.tokens:
                    usage = generation.usage if self._options.continuous_usage_stats else None
                    chunk += envelope.text_chunk(index, delta.text, delta.finish_reason, usage, logprobs.entry(index, delta.tokens))
                if self._phase is _Phase.NOTHING_SENT:
                    self._phase = _Phase.STREAMING
                    await _send_start(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])
                if chunk:
                    await _send_body(send, chunk, more=True)
        end = answers.DONE
        if self._options.include_usage:
            end = envelope.usage_chunk(generation.usage, generation.metrics) + end
        self._phase = _Phase.ENDING
        await _send_body(send, end, more=False)


class BodyResponse(GenerationResponse):
    """One JSON body when all is done."""

    async def _answer(self, send: Send) -> None:
        generation = self._generation
        texts: list[list[str]] = [[] for _ in generation.job.requests]
        tokens: list[list[ReportedToken]] = [[] for _ in texts]
        of_prompts: list[list[TokenLogprobs]] = [[] for _ in texts]
        finish_reasons = [""] * len(texts)
        async with aclosing(generation.run()) as deltas:
            async for index, delta in deltas:
                texts[index].append(delta.text)
                tokens[index] += delta.tokens
                of_prompts[index] += delta.prompt_logprobs
                if delta.finish_reason is not None:
                    finish_reasons[index] = delta.finish_reason
        logprobs = LogprobWriter(generation.vocabulary, self._envelope.is_chat)
        choices = [
            Choice(
                "".join(texts[index]),
                finish_reasons[index],
                logprobs.entry(index, tokens[index]),
                prompt_logprobs(generation.vocabulary, request, of_prompts[index]),
            )
            for index, request in enumerate(generation.job.requests)
        ]
        body = self._envelope.body(choices, generation.usage, generation.metrics)
        self._phase = _Phase.ENDING
        await send_json(send, 200, body)


async def send_error(send: Send, error: ErrorAnswer) -> None:
    """Send a whole error answer."""
    headers = [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]
    await send_json(send, error.status, error.body, headers)


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Send a whole JSON answer."""
    length = (b"content-length", str(len(body)).encode())
    await _send_start(send, status, [(b"content-type", b"application/json"), length, *(headers or [])])
    await _send_body(send, body, more=False)


async def _send_start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
