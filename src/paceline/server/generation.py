"""Runs one job: engine requests to text, with what they cost. Between the engine and the two kinds of answer in `stream.py`.

Closing `run` early, by a stop string, a client that left or an error, aborts what still runs in the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.core.outcome import DraftStats, RequestStats, TokenDelta
from paceline.core.request import FinishReason, Request
from paceline.errors import BadInputError, PacelineError
from paceline.metrics.requests import FinishedRequest, RequestMetrics
from paceline.server.chat import Job
from paceline.server.detokenize import Detokenizer, TextDelta, Vocabulary, joined
from paceline.server.engine_port import Engine
from paceline.server.openai.answers import AnswerMetrics, Usage

_BROKEN = (FinishReason.ERROR, FinishReason.ABORT)  # how the engine ends what it cannot finish


@dataclass(slots=True)
class Tally:
    """What one engine request cost so far.

    The engine's own figures come with the first and the last delta; those of a request that a stop string ended are counted here.
    """

    request: Request
    detokenizer: Detokenizer
    is_over: bool = False  # its last text has been handed on
    num_output_tokens: int = 0
    first_s: float | None = None  # time.monotonic() of the first delta
    last_s: float = 0.0
    stats: RequestStats | None = None  # the engine's latest
    is_final: bool = False  # `stats` came with the last delta
    counted: DraftStats = field(default_factory=DraftStats)

    def add(self, delta: TokenDelta, text: TextDelta, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        elif delta.num_drafted:
            if delta.token_ids:  # a delta is one step: its accepted drafts and one more token
                self.counted.count_drafts(delta.num_drafted, len(delta.token_ids) - 1)
        elif delta.token_ids:
            self.counted.num_plain_steps += 1
            self.counted.num_control_steps += delta.is_control
        self.last_s = now_s
        self.num_output_tokens += text.num_tokens
        if delta.stats is not None:
            self.stats = delta.stats
            self.is_final = delta.finish_reason is not None

    @property
    def draft(self) -> DraftStats:
        return self.stats.draft if self.stats is not None and self.is_final else self.counted

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.stats is None else self.stats.num_cached_tokens

    @property
    def queue_ms(self) -> float:
        return 0.0 if self.stats is None else self.stats.queue_ms

    @property
    def prefill_ms(self) -> float:
        if self.stats is not None:
            return self.stats.prefill_ms
        return 0.0 if self.first_s is None else (self.first_s - self.request.arrival_s) * 1e3

    @property
    def decode_ms(self) -> float:
        if self.stats is not None and self.is_final:
            return self.stats.decode_ms
        return self.token_span_s * 1e3

    @property
    def token_span_s(self) -> float:
        return 0.0 if self.first_s is None else self.last_s - self.first_s


class TextSink(Protocol):
    """Takes text on the shortest way to the client."""

    @property
    def is_ready(self) -> bool: ...

    def take(self, index: int, delta: TextDelta) -> None: ...


class Generation:
    """One job in the engine."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary, job: Job, metrics: RequestMetrics, verification: str) -> None:
        """`verification`: the rule's name, for the answer's metrics."""
        self._engine = engine
        self.vocabulary = vocabulary
        self._metrics = metrics
        self._verification = verification
        self.job = job
        self._tallies = [
            Tally(request, Detokenizer(vocabulary, request.prompt_token_ids, job.stops, request.sampling.min_tokens))
            for request in job.requests
        ]
        # Of several prompts; holds at most their answers.
        self._merged: asyncio.Queue[tuple[int, TextDelta] | None] | None = asyncio.Queue() if len(self._tallies) > 1 else None
        self._early_end = FinishReason.ABORT

    def run(self, sink: TextSink | None = None) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """(prompt, text) as it comes, until every prompt has finished. Raises what the engine raised, PacelineError if it gave up.

        `sink` is handed what comes in the midst of a single answer while the reader waits and the sink is ready; it is not yielded.
        """
        if len(self._tallies) > 1 or self.job.stops:
            sink = None  # of several answers the order, and where a stop string ends one, are found out on the way to the reader
        streams = [self._run_one(index, sink) for index in range(len(self._tallies))]
        return streams[0] if self._merged is None else _merge(streams, self._merged)

    def time_out(self) -> None:
        """Say, before `run` is closed early, that the time limit is why."""
        self._early_end = FinishReason.TIMEOUT

    def rest(self) -> list[tuple[int, TextDelta]]:
        """What an answer that ran out of time still has to say: text that nobody took from `run`, then the end of each open prompt."""
        rest: list[tuple[int, TextDelta]] = []
        while self._merged is not None and not self._merged.empty():
            item = self._merged.get_nowait()
            if item is not None:
                rest.append(item)
        for index, tally in enumerate(self._tallies):
            if not tally.is_over:
                rest.append((index, tally.detokenizer.push(TokenDelta(tally.request.request_id, (), self._early_end))))
        return rest

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        drafts = [tally.draft for tally in self._tallies if tally.request.prediction_token_ids]
        num_accepted = sum(draft.num_accepted_tokens for draft in drafts)
        num_drafted = sum(draft.num_draft_tokens for draft in drafts)
        return Usage(
            num_prompt_tokens=sum(len(tally.request.prompt_token_ids) for tally in self._tallies[:: self.job.num_choices]),
            num_output_tokens=sum(tally.num_output_tokens for tally in self._tallies),
            num_cached_tokens=sum(tally.num_cached_tokens for tally in self._tallies),
            prediction=(num_accepted, num_drafted - num_accepted) if drafts else None,
        )

    @property
    def metrics(self) -> AnswerMetrics:
        """What the job cost; with several prompts, steps are summed and times are those of the slowest."""
        draft = DraftStats()
        for tally in self._tallies:
            _add(draft, tally.draft)
        return AnswerMetrics(
            draft=draft,
            max_draft_length=max(self._max_draft_length(tally) for tally in self._tallies),
            verification=self._verification,
            queue_ms=max(tally.queue_ms for tally in self._tallies),
            prefill_ms=max(tally.prefill_ms for tally in self._tallies),
            decode_ms=max(tally.decode_ms for tally in self._tallies),
        )

    @property
    def first_token_ms(self) -> float:
        """From the arrival of the request to its first token."""
        return max(((tally.first_s or tally.request.arrival_s) - tally.request.arrival_s) * 1e3 for tally in self._tallies)

    @property
    def latency_ms(self) -> float:
        """From the arrival of the request to its last token so far."""
        return max((max(tally.last_s, tally.request.arrival_s) - tally.request.arrival_s) * 1e3 for tally in self._tallies)

    def _max_draft_length(self, tally: Tally) -> int:
        if tally.stats is not None:
            return tally.stats.max_draft_length
        facts, limit = self._engine.facts, tally.request.max_draft_length
        if facts.drafter == "none":
            return 0
        return facts.max_draft_length if limit is None else limit

    async def _run_one(self, index: int, sink: TextSink | None) -> AsyncGenerator[tuple[int, TextDelta], None]:
        tally = self._tallies[index]
        push = tally.detokenizer.push

        def take(delta: TokenDelta, more: Sequence[TokenDelta]) -> bool:
            assert sink is not None
            if delta.finish_reason is not None or tally.first_s is None or not sink.is_ready:
                return False
            if more:
                text = self._observed(tally, (delta, *more))
            else:
                text = push(delta)
                self._observe(tally, delta, text)
            sink.take(index, text)
            return True

        deltas = self._engine.submit(tally.request, None if sink is None else take)
        last: TextDelta | None = None
        ended: FinishReason | None = None
        try:
            async for delta in deltas:
                is_broken = delta.finish_reason is not None and delta.finish_reason in _BROKEN
                if is_broken and not delta.token_ids:
                    raise _error_of(delta)
                # What came in the same step before a failure is said, and may hold a stop string: as without drafts.
                text = push(replace(delta, finish_reason=None) if is_broken else delta)
                self._observe(tally, delta, text)
                if text.finish_reason is not None:
                    last, ended = text, text.finish_reason
                    break
                yield index, text
                if is_broken:
                    raise _error_of(delta)
            if last is None:
                raise PacelineError("the engine ended this request without a reason")
        except PacelineError:
            ended = FinishReason.ERROR
            raise
        finally:
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()  # after a stop string this tells the engine to stop, before the client has read the end
            self._metrics.finished(_finished(tally, ended or self._early_end))
        tally.is_over = True
        yield index, last

    def _observed(self, tally: Tally, deltas: Sequence[TokenDelta]) -> TextDelta:
        """The text of deltas that came together, behind the first: a chunk for the client, and to the counts each what it is."""
        now_s = time.monotonic()
        self._metrics.next_tokens(now_s - tally.last_s, sum(len(delta.token_ids) for delta in deltas))
        texts = [tally.detokenizer.push(delta) for delta in deltas]
        for delta, text in zip(deltas, texts, strict=True):
            tally.add(delta, text, now_s)
        return joined(texts)

    def _observe(self, tally: Tally, delta: TokenDelta, text: TextDelta) -> None:
        now_s = time.monotonic()
        if tally.first_s is None:
            self._metrics.first_tokens(now_s - tally.request.arrival_s)
        else:
            self._metrics.next_tokens(now_s - tally.last_s, len(delta.token_ids))
        tally.add(delta, text, now_s)


def _error_of(delta: TokenDelta) -> PacelineError:
    if delta.error is None:
        return PacelineError("the engine ended this request before it was finished")
    return BadInputError(delta.error) if delta.is_refusal else PacelineError(delta.error)


async def _merge(
    streams: Sequence[AsyncIterator[tuple[int, TextDelta]]], queue: asyncio.Queue[tuple[int, TextDelta] | None]
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Items of all streams as they come, through `queue`. The first error ends all."""

    async def pump(stream: AsyncIterator[tuple[int, TextDelta]]) -> None:
        async for item in stream:
            queue.put_nowait(item)

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(pump(stream))
        finally:
            queue.put_nowait(None)

    pumps = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await pumps
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        pumps.cancel()
        await asyncio.wait([pumps])


def _add(total: DraftStats, part: DraftStats) -> None:
    total.num_plain_steps += part.num_plain_steps
    total.num_control_steps += part.num_control_steps
    for num_drafted, histogram in part.histograms_by_draft_length.items():
        for num_accepted, num_steps in enumerate(histogram):
            total.count_drafts(num_drafted, num_accepted, num_steps)


def _finished(tally: Tally, reason: FinishReason) -> FinishedRequest:
    return FinishedRequest(
        finish_reason=reason,
        num_prompt_tokens=len(tally.request.prompt_token_ids),
        num_output_tokens=tally.num_output_tokens,
        num_spec_steps=tally.draft.num_spec_steps,
        e2e_s=tally.last_s - tally.request.arrival_s,
        queue_s=tally.queue_ms / 1e3,
        prefill_s=tally.prefill_ms / 1e3,
        decode_s=tally.decode_ms / 1e3,
        token_span_s=tally.token_span_s,
    )
