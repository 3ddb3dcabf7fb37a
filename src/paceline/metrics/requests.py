"""What the server saw of its requests: counts and histograms, owned here and filled by `server/`. Rendered by `prometheus.py`.

All intervals are differences of this process's monotonic clock. Not thread-safe: one event loop owns an instance.
"""

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from paceline.core.request import FinishReason
from paceline.metrics.catalog import CATALOG, Kind

THROUGHPUT_WINDOW_S = 30
_MAX_UNCOUNTED = 512  # counted in 0.05 ms


class ErrorKind(StrEnum):
    """Values of `paceline_errors_total{kind}`: a fixed set, so that a client cannot grow it."""

    BAD_INPUT = "bad_input"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    SLOW_READER = "slow_reader"  # no answer: the connection was cut
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    ENGINE_DEAD = "engine_dead"
    ENGINE_FAILED = "engine_failed"
    INTERNAL = "internal"


class Histogram:
    """Counts by upper bound. `observe` takes a weight: the tokens of one step are one call.

    Single observations are kept until there are many or someone reads: sorted, they are counted at a fifth of the price of each by itself.
    """

    __slots__ = ("_bounds", "_counts", "_new", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._new: list[float] = []

    def observe(self, value: float, weight: int = 1) -> None:
        if weight == 1:
            new = self._new
            new.append(value)
            if len(new) >= _MAX_UNCOUNTED:
                self._count_new()
            return
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def totals(self) -> list[int]:
        """Observations up to each upper bound, and then all of them."""
        self._count_new()
        return list(accumulate(self._counts))

    @property
    def count(self) -> int:
        self._count_new()
        return sum(self._counts)

    @property
    def sum(self) -> float:
        self._count_new()
        return self._sum

    def _count_new(self) -> None:
        new = self._new
        if not new:
            return
        self._sum += sum(new)
        new.sort()
        num_below = 0
        for index, bound in enumerate(self._bounds):
            num_up_to = bisect_right(new, bound, num_below)
            self._counts[index] += num_up_to - num_below
            num_below = num_up_to
        self._counts[-1] += len(new) - num_below
        new.clear()


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request at its end; times in seconds."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_spec_steps: int
    e2e_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    token_span_s: float  # last delta - first delta


class RequestMetrics:
    """All observations since the server started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._finished = deque[list[int]]()  # [whole second, requests that ended in it], oldest first
        self.finished_by_reason = dict.fromkeys(FinishReason, 0)
        self.errors = dict.fromkeys(ErrorKind, 0)
        self.histograms = {
            metric.name: Histogram(metric.buckets) for metric in CATALOG.values() if metric.kind is Kind.HISTOGRAM and not metric.labels
        }
        self._chunk_gap = self.histograms["paceline_chunk_gap_seconds"]  # these two are filled once a step
        self._token_time = self.histograms["vllm:inter_token_latency_seconds"]
        latency = CATALOG["llm_latency_seconds"].buckets
        self.latency_by_type = {"speculative": Histogram(latency), "baseline": Histogram(latency)}

    def first_tokens(self, ttft_s: float) -> None:
        """The first delta of a request came `ttft_s` after its arrival."""
        self.histograms["vllm:time_to_first_token_seconds"].observe(ttft_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """A later delta of `num_tokens` came `gap_s` after the one before: each token took an equal share."""
        if num_tokens == 1:
            self._chunk_gap.observe(gap_s)
            self._token_time.observe(gap_s)
        elif num_tokens:
            self._chunk_gap.observe(gap_s)
            self._token_time.observe(gap_s / num_tokens, num_tokens)

    def finished(self, request: FinishedRequest) -> None:
        """A request ended. Latencies are observed for answers only; aborted, late and failed requests are only counted."""
        self.finished_by_reason[request.finish_reason] += 1
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._count_finished()
        if request.num_output_tokens > 1:
            time_per_token_s = request.token_span_s / (request.num_output_tokens - 1)
            self.histograms["vllm:request_time_per_output_token_seconds"].observe(time_per_token_s)
        for name, value in (
            ("vllm:e2e_request_latency_seconds", request.e2e_s),
            ("vllm:request_queue_time_seconds", request.queue_s),
            ("vllm:request_prefill_time_seconds", request.prefill_s),
            ("vllm:request_decode_time_seconds", request.decode_s),
            ("vllm:request_prompt_tokens", request.num_prompt_tokens),
            ("vllm:request_generation_tokens", request.num_output_tokens),
        ):
            self.histograms[name].observe(value)
        self.latency_by_type["speculative" if request.num_spec_steps else "baseline"].observe(request.e2e_s)

    def error(self, kind: ErrorKind) -> None:
        self.errors[kind] += 1

    def throughput(self) -> float:
        """Answers per second over the last `THROUGHPUT_WINDOW_S` seconds."""
        self._drop_old()
        return sum(count for _, count in self._finished) / THROUGHPUT_WINDOW_S

    def _count_finished(self) -> None:
        now_s = self._drop_old()
        if not self._finished or self._finished[-1][0] != now_s:
            self._finished.append([now_s, 0])
        self._finished[-1][1] += 1

    def _drop_old(self) -> int:
        now_s = int(self._clock())
        while self._finished and self._finished[0][0] <= now_s - THROUGHPUT_WINDOW_S:
            self._finished.popleft()
        return now_s
