"""How a response reaches its client: as one body, as a stream, or later, while it is made without a client."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.metrics.requests import RequestMetrics
from paceline.server.detokenize import TextDelta
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight, InterruptedAnswerError, Interruption
from paceline.server.limits import Place
from paceline.server.openai.errors import STOPPING, ErrorAnswer, answer_for
from paceline.server.responses.reply import Reply
from paceline.server.stream import EventStream, WholeAnswer

_log = logging.getLogger(__name__)


class WholeResponse(WholeAnswer):
    """One JSON object."""

    def __init__(self, reply: Reply, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()  # the client left, or the time was up before the first step; no news for one that has ended

    async def _finished_body(self) -> bytes:
        await self._reply.follow()
        return self._reply.body()

    async def _end_broken(self, error: ErrorAnswer, send: Send) -> None:
        self._reply.fail(error)
        await super()._end_broken(error, send)


class ResponseStream(EventStream):
    """Typed events, the last of which has the whole response."""

    def __init__(self, reply: Reply, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()

    def _event(self, index: int, delta: TextDelta) -> bytes:
        self._reply.feed(delta)
        return self._reply.events.take()

    def _end(self) -> bytes:
        self._reply.finish()
        return self._reply.events.take()

    async def _end_broken(self, error: ErrorAnswer, send: Send) -> None:
        self._reply.fail(error)
        await super()._end_broken(error, send)

    def _error_event(self, error: ErrorAnswer) -> bytes:
        return self._reply.events.take()


class BackgroundResponse:
    """Runs without a client until its end, a cancellation, the time limit or the server's end."""

    def __init__(self, reply: Reply, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        self._reply = reply
        self._generation = generation
        self._in_flight = in_flight
        self._metrics = metrics
        self._interrupt: Callable[[Interruption], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def body(self) -> bytes:
        return self._reply.body()

    def start(self, place: Place) -> None:
        """Begin. The place of the request is kept until the end, and its clock runs on."""
        place.keep()
        if place.deadline is not None:
            place.deadline.take_over(self._time_out)
        self._task = self._in_flight.start(self._run(place))

    async def cancel(self) -> None:
        assert self._interrupt is not None, "a client knows of it only after it has begun"
        assert self._task is not None
        self._interrupt(Interruption.CANCELLED)
        await asyncio.wait([self._task])

    async def _run(self, place: Place) -> None:
        try:
            with self._in_flight.answering(None) as interrupt:
                self._interrupt = interrupt
                await self._reply.follow()
        except InterruptedAnswerError as error:
            if error.reason is Interruption.CANCELLED:
                self._reply.cancel()
            elif error.reason is Interruption.SHUT_DOWN:
                self._fail(STOPPING)
            else:
                assert place.deadline is not None
                self._fail(place.deadline.answer)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("response %s failed", self._generation.job.answer_id)
            else:
                _log.error("response %s failed: %s", self._generation.job.answer_id, error)
            self._fail(answer_for(error))
        finally:
            self._reply.cancel()  # by who ends all tasks; no news for one that has ended
            place.give_back()

    def _time_out(self) -> None:
        if self._interrupt is None:  # it begins in a moment
            asyncio.get_running_loop().call_soon(self._time_out)
            return
        self._generation.time_out()
        self._interrupt(Interruption.TIMEOUT)

    def _fail(self, error: ErrorAnswer) -> None:
        self._metrics.error(error.kind)
        self._reply.fail(error)
