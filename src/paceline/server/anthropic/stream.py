"""The two answers of `POST /v1/messages`, on the classes of `server/stream.py`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.metrics.requests import RequestMetrics
from paceline.server.anthropic import answers
from paceline.server.anthropic.answers import BlockWriter, Ending, Envelope, Limits, ending
from paceline.server.anthropic.blocks import Pieces
from paceline.server.detokenize import TextDelta
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight
from paceline.server.openai.errors import ErrorAnswer
from paceline.server.stream import EventStream, WholeAnswer

_PING_S = 10.0  # without news: below the patience of common proxies


@dataclass(frozen=True, slots=True)
class Form:
    """How one answer is told. `error` encodes errors."""

    envelope: Envelope
    limits: Limits
    error: Callable[[ErrorAnswer], bytes]


class MessageResponse(WholeAnswer):
    """One message."""

    def __init__(self, generation: Generation, form: Form, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._form = form

    def _body(self, choices: Sequence[TextDelta]) -> bytes:
        (choice,) = choices
        generation = self._generation
        parser, pieces = generation.job.new_parser(), Pieces()
        deltas = [*parser.feed(choice.text), *parser.finish()]
        content = pieces.add(deltas, parser.num_calls)
        end = ending(choice, parser.num_calls, self._form.limits)
        return self._form.envelope.body(content, end, generation.usage, generation.metrics)

    def _error_body(self, error: ErrorAnswer) -> bytes:
        return self._form.error(error)


class MessageStream(EventStream):
    """The events of one message. It begins with the first tokens, when the prompt's cached ones are known."""

    def __init__(self, generation: Generation, form: Form, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._form = form
        self._parser = generation.job.new_parser()
        self._pieces = Pieces()
        self._blocks = BlockWriter()
        self._is_begun = False
        self._last_news_s = 0.0  # time.monotonic()
        self._ending = Ending("end_turn", None)  # known with the last delta

    def _event(self, index: int, delta: TextDelta) -> bytes:
        start = b""
        if not self._is_begun:
            self._is_begun = True
            start = self._form.envelope.start(self._generation.usage)
        deltas = list(self._parser.feed(delta.text))
        if delta.finish_reason is not None:
            deltas += self._parser.finish()
            self._ending = ending(delta, self._parser.num_calls, self._form.limits)
        return self._or_ping(start + self._blocks.write(self._pieces.add(deltas, self._parser.num_calls)))

    def _end(self) -> bytes:
        generation = self._generation
        return self._blocks.close() + answers.message_end(self._ending, generation.usage, generation.metrics)

    def _or_ping(self, events: bytes) -> bytes:
        """A long call is silence: now and then a sign that the connection is alive."""
        now_s = time.monotonic()
        if not events and now_s - self._last_news_s > _PING_S:
            events = answers.PING
        if events:
            self._last_news_s = now_s
        return events

    def _error_body(self, error: ErrorAnswer) -> bytes:
        return self._form.error(error)

    def _error_event(self, error: ErrorAnswer) -> bytes:
        return answers.error_event(self._form.error(error))
