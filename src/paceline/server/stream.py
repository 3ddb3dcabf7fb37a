"""The two ASGI answers of a generation: server-sent events, and one JSON body. Hand-written, because a chunk per step must be cheap.

Both watch the client and the clock while they work: a client that leaves or a time limit ends the generation at once. What breaks after
a stream has begun becomes its last event.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from enum import Enum, auto
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.metrics.requests import RequestMetrics
from paceline.server.connection import PART_WRITER, PartWriter
from paceline.server.detokenize import TextDelta, joined
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight, InterruptedAnswerError, Interruption
from paceline.server.limits import deadline_of
from paceline.server.openai import answers
from paceline.server.openai.answers import Choice, Envelope
from paceline.server.openai.errors import STOPPING, ErrorAnswer, answer_for
from paceline.server.openai.logprobs import LogprobWriter, prompt_logprobs
from paceline.server.openai.messages import Message, delta_fields, finish_reason
from paceline.server.openai.requests import StreamOptions
from paceline.server.parsing.deltas import OutputParser, PlainParser

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # a client that does not read gets no longer to take the last event

SEND_PART = "paceline.send_part"  # in an ASGI scope: the server's own `send`, for parts of a body that are neither first nor last
Headers = list[tuple[bytes, bytes]]


class _Phase(Enum):
    """How far an answer has got, which decides how an error can still be told."""

    NOTHING_SENT = auto()  # as an HTTP status
    STREAMING = auto()  # as an event
    ENDING = auto()  # not at all: the end is being sent


class GenerationResponse(Response):
    """Runs a generation inside the response, where the client can be watched. Subclasses say what is sent."""

    def __init__(self, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__()
        self._generation = generation
        self._in_flight = in_flight
        self._metrics = metrics
        self._phase = _Phase.NOTHING_SENT
        self._send_part: Send | None = None
        self._part_writer: PartWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own, so that a chunk does not wake it through the dozen coroutines that lie around a route.
        await asyncio.create_task(self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = deadline_of(scope)
        self._send_part = scope.get(SEND_PART, send)
        self._part_writer = scope.get(PART_WRITER)
        try:
            with self._in_flight.answering(receive) as interrupt:
                if deadline is not None:
                    deadline.take_over(partial(self._time_out, interrupt))
                await self._answer(send)
        except InterruptedAnswerError as error:
            if error.reason is Interruption.SHUT_DOWN:
                await self._end_broken(STOPPING, send)
            elif error.reason is Interruption.TIMEOUT:
                assert deadline is not None
                await self._end_late(deadline.answer, send)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("request %s failed", self._generation.job.answer_id)
            else:
                _log.error("request %s failed: %s", self._generation.job.answer_id, error)
            await self._end_broken(answer_for(error), send)

    async def _answer(self, send: Send) -> None:
        raise NotImplementedError

    def _time_out(self, interrupt: Callable[[Interruption], None]) -> None:
        if self._phase is not _Phase.ENDING:  # then the engine is done, and only the client still has to read
            self._generation.time_out()
            interrupt(Interruption.TIMEOUT)

    async def _end_late(self, error: ErrorAnswer, send: Send) -> None:
        """The time was up, and the engine has been told to stop."""
        await self._end_broken(error, send)

    async def _end_broken(self, error: ErrorAnswer, send: Send) -> None:
        self._metrics.error(error.kind)
        phase, self._phase = self._phase, _Phase.ENDING
        if phase is _Phase.NOTHING_SENT:
            await self._say_last(send_error(send, error, self._error_body(error)))
        elif phase is _Phase.STREAMING:
            await self._say_last(send_body(send, self._error_event(error), more=False))

    def _error_body(self, error: ErrorAnswer) -> bytes:
        """An error as the whole answer."""
        return error.body

    def _error_event(self, error: ErrorAnswer) -> bytes:
        """An error as the last event of a stream."""
        return answers.error_event(error.body)

    async def _say_last(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await sending
        except TimeoutError:
            _log.warning("request %s: the client did not read the end", self._generation.job.answer_id)


class EventStream(GenerationResponse):
    """Server-sent events: one message for each step that made text, then the end. Subclasses say what the events are.

    The response begins with the first text, so that what fails before it still gets its own HTTP status.
    """

    def __init__(self, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._unsent = b""  # being sent: where that is cut short, nothing of it has been written

    def _event(self, index: int, delta: TextDelta) -> bytes:
        """What a delta of choice `index` tells the client; nothing if it has no news."""
        raise NotImplementedError

    def _end(self) -> bytes:
        """What follows the last delta."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """For a generation's sink: whether events can go straight to the connection."""
        return self._phase is _Phase.STREAMING and self._part_writer is not None and self._part_writer.is_ready

    def take(self, index: int, delta: TextDelta) -> None:
        """For a generation's sink."""
        assert self._part_writer is not None
        event = self._event(index, delta)
        if event:
            self._part_writer.write(event)

    async def _answer(self, send: Send) -> None:
        send_part, is_begun = self._send_part or send, False
        async with aclosing(self._generation.run(self)) as deltas:
            async for index, delta in deltas:
                event = self._event(index, delta)
                if not is_begun:
                    is_begun = True
                    await send_stream_start(send)
                    self._phase = _Phase.STREAMING
                if event:
                    self._unsent = event
                    await send_part({"type": "http.response.body", "body": event, "more_body": True})
                    self._unsent = b""
        end = self._end()
        self._phase = _Phase.ENDING
        await send_body(send, end, more=False)

    async def _end_late(self, error: ErrorAnswer, send: Send) -> None:
        """A stream that has begun ends in good order, with what it has and why."""
        if self._phase is not _Phase.STREAMING:
            await super()._end_late(error, send)
            return
        self._phase = _Phase.ENDING
        rest = (self._event(index, delta) for index, delta in self._generation.rest())
        # The engine is done, so this may wait for the client to read; `connection.py` says for how long.
        await send_body(send, b"".join((self._unsent, *rest, self._end())), more=False)


class StreamResponse(EventStream):
    """OpenAI's stream: chunks of text, then usage if asked for, then [DONE]."""

    def __init__(
        self,
        generation: Generation,
        envelope: Envelope,
        in_flight: InFlight,
        metrics: RequestMetrics,
        options: StreamOptions,
    ) -> None:
        super().__init__(generation, in_flight, metrics)
        self._envelope = envelope
        self._options = options
        self._logprobs = LogprobWriter(generation.vocabulary, envelope.is_chat)
        self._parsers: dict[int, OutputParser] = {}  # of the choices that have had their first chunk
        self._plain = set[int]()  # those whose text is content and nothing else

    def _event(self, index: int, delta: TextDelta) -> bytes:
        if index in self._plain and delta.finish_reason is None and not delta.tokens:
            return self._envelope.text_chunk(index, delta.text) if delta.text else b""
        chunk = b""
        if index not in self._parsers:
            parser = self._parsers[index] = self._generation.job.new_parser()
            chunk = self._envelope.first_chunk(index, self._generation.job.requests[index].prompt_token_ids)
            has_more = self._options.continuous_usage_stats or self._envelope.has_token_ids
            if isinstance(parser, PlainParser) and not has_more:
                self._plain.add(index)
        part, reason = self._part(self._parsers[index], delta)
        token_ids = delta.token_ids if self._envelope.has_token_ids else None
        if part or reason is not None or delta.tokens or token_ids:
            usage = self._generation.usage if self._options.continuous_usage_stats else None
            chunk += self._envelope.chunk(index, part, reason, usage, self._logprobs.entry(index, delta.tokens), token_ids)
        return chunk

    def _part(self, parser: OutputParser, delta: TextDelta) -> tuple[str | dict[str, object], str | None]:
        """What a delta adds to its choice, and why it ends there if it does."""
        if not self._envelope.is_chat:
            return delta.text, delta.finish_reason
        parts = list(parser.feed(delta.text))
        if delta.finish_reason is None:
            return delta_fields(parts), None
        parts += parser.finish()
        return delta_fields(parts), finish_reason(delta.finish_reason, parser.num_calls)

    def _end(self) -> bytes:
        if not self._options.include_usage:
            return answers.DONE
        return self._envelope.usage_chunk(self._generation.usage, self._generation.metrics) + answers.DONE


class WholeAnswer(GenerationResponse):
    """One JSON body when all is done. Subclasses say what stands in it."""

    def _body(self, choices: Sequence[TextDelta]) -> bytes:
        """`choices`: each answer as one delta."""
        raise NotImplementedError

    async def _answer(self, send: Send) -> None:
        body = await self._finished_body()
        self._phase = _Phase.ENDING
        await send_json(send, 200, body)

    async def _finished_body(self) -> bytes:
        """Run the generation to its end, and say what the client gets."""
        parts: list[list[TextDelta]] = [[] for _ in self._generation.job.requests]
        async with aclosing(self._generation.run()) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        return self._body([joined(deltas) for deltas in parts])


class BodyResponse(WholeAnswer):
    """OpenAI's answer to a request that does not stream."""

    def __init__(self, generation: Generation, envelope: Envelope, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._envelope = envelope

    def _body(self, choices: Sequence[TextDelta]) -> bytes:
        generation = self._generation
        logprobs = LogprobWriter(generation.vocabulary, self._envelope.is_chat)
        told = [
            Choice(
                *self._content(choice),
                logprobs.entry(index, choice.tokens),
                prompt_logprobs(generation.vocabulary, request, choice.prompt_logprobs),
                (request.prompt_token_ids, choice.token_ids) if self._envelope.has_token_ids else None,
            )
            for index, (choice, request) in enumerate(zip(choices, generation.job.requests, strict=True))
        ]
        return self._envelope.body(told, generation.usage, generation.metrics)

    def _content(self, choice: TextDelta) -> tuple[str | dict[str, object], str]:
        """A whole answer, and why it ended."""
        assert choice.finish_reason is not None, "a whole answer has ended"
        if not self._envelope.is_chat:
            return choice.text, choice.finish_reason
        parser, message = self._generation.job.new_parser(), Message()
        message.add(parser.feed(choice.text))
        message.add(parser.finish())
        return message.fields(), finish_reason(choice.finish_reason, parser.num_calls)


async def send_error(send: Send, error: ErrorAnswer, body: bytes) -> None:
    """Send a whole error answer. `body` tells it in the form of the API that was asked."""
    headers = [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]
    await send_json(send, error.status, body, headers)


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Send a whole JSON answer."""
    length = (b"content-length", str(len(body)).encode())
    await _send_start(send, status, [(b"content-type", b"application/json"), length, *(headers or [])])
    await send_body(send, body, more=False)


async def send_stream_start(send: Send) -> None:
    """Begin an answer of server-sent events."""
    await _send_start(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])


async def _send_start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, more: bool) -> None:
    """Send a part of a body, the last one without `more`."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
