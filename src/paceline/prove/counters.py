"""A server's Prometheus counters before and after a block, and whether it is busy. Called by `measure.py`.

Counters by their `_total` names: a `_created` gauge summed as a counter has fooled other clients. Sums over label sets; of the two gauges
that tell how a device is used the mean.
"""

import asyncio
import math
import re
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.errors import MissingError
from paceline.prove.client import ChatClient

GENERATION_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
NUM_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
NUM_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
NUM_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GPU_PERCENT = "gpu_utilization_percent"
BANDWIDTH_FRACTION = "paceline_memory_bandwidth_fraction"
_GAUGE_LIMITS = {GPU_PERCENT: 100.0, BANDWIDTH_FRACTION: 100.0}  # what lies beyond 0 and this is no share of anything
_OTHER_COUNTERS = ("trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total")
_COUNTERS = frozenset(
    (*GENERATION_COUNTERS, NUM_DRAFTS, NUM_DRAFT_TOKENS, NUM_ACCEPTED_TOKENS, NUM_ACCEPTED_PER_POSITION, *_OTHER_COUNTERS)
)
_BUSY_GAUGES = frozenset(
    (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs",
        "llamacpp:requests_processing", "llamacpp:requests_deferred",
    )
)  # fmt: skip
_KNOWN = _COUNTERS | _BUSY_GAUGES | _GAUGE_LIMITS.keys()
_PATHS = ("/metrics", "/prometheus/metrics")
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?\s+([^\s]+)")
_POSITION = re.compile(r'(?:position|token_position)="(\d{1,4})"')
_POLL_S = 0.1
_WATCH_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one look at `/metrics` found; empty where the server has none."""

    counters: dict[str, float] = field(default_factory=dict[str, float])  # accepted tokens per position as `name{position="0"}`
    num_busy: int | None = None  # requests running or waiting; None: it does not say
    gauges: dict[str, float] = field(default_factory=dict[str, float])  # mean over label sets


def parse(text: str) -> Scrape:
    """The samples that matter here of an exposition in Prometheus' text format."""
    counters: dict[str, float] = {}
    num_busy: float | None = None
    gauges: dict[str, list[float]] = {}
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None or sample[1] not in _KNOWN:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if sample[1] in _BUSY_GAUGES:
            num_busy = (num_busy or 0) + value
            continue
        name = sample[1]
        if name in _GAUGE_LIMITS:
            if 0 <= value <= _GAUGE_LIMITS[name]:
                gauges.setdefault(name, []).append(value)
            continue
        if name == NUM_ACCEPTED_PER_POSITION and (position := _POSITION.search(sample[2] or "")):
            name = f'{name}{{position="{position[1]}"}}'
        counters[name] = counters.get(name, 0.0) + value
    means = {name: sum(values) / len(values) for name, values in gauges.items()}
    return Scrape(counters, None if num_busy is None else int(num_busy), means)


class Meter:
    """Reads one server's counters."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._path: str | None = _PATHS[0]

    async def find(self) -> Scrape:
        """Look where the counters are. A server without any is read no more."""
        for path in _PATHS:
            self._path = path
            scrape = await self.read()
            if scrape.counters or scrape.num_busy is not None or scrape.gauges:
                return scrape
        self._path = None
        return Scrape()

    async def read(self) -> Scrape:
        if self._path is None:
            return Scrape()
        try:
            status, body = await self._client.get(self._path, timeout_s=5.0)
        except MissingError:
            return Scrape()
        return parse(body.decode(errors="replace")) if status == 200 else Scrape()

    async def settled(self, before: Scrape, num_tokens: int, timeout_s: float = 1.0) -> Scrape:
        """The counters once they include the `num_tokens` generated since `before`: engines report now and then.

        Gives up when they have stood still for `timeout_s`.
        """
        name = next((name for name in GENERATION_COUNTERS if name in before.counters), None)
        scrape, changed_s = await self.read(), time.monotonic()
        while name is not None and scrape.counters.get(name, 0.0) - before.counters[name] < num_tokens:
            if time.monotonic() - changed_s > timeout_s:
                break
            await asyncio.sleep(_POLL_S)
            last, scrape = scrape, await self.read()
            if scrape.counters != last.counters:
                changed_s = time.monotonic()
        return scrape

    async def idle(self, timeout_s: float) -> Scrape:
        """Wait until the server has nothing to do, as far as it says. The scrape tells whether it came to that."""
        end_s = time.monotonic() + timeout_s
        while True:
            scrape = await self.read()
            if not scrape.num_busy or time.monotonic() >= end_s:
                return scrape
            await asyncio.sleep(_POLL_S)


class Watch:
    """Looks at a server's use of its device while a run is in flight, as an async context manager around it.

    Only the GPU's share must be looked at in the midst: the driver's window is short, and ends with the run. A server without one is
    not asked. The share of the bandwidth is of recent steps, so that the look behind the run has it.
    """

    def __init__(self, meter: Meter, before: Scrape) -> None:
        self._meter, self._is_needed = meter, GPU_PERCENT in before.gauges
        self._seen: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._is_needed:
            self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            gauges = (await self._meter.read()).gauges
            if GPU_PERCENT in gauges:
                self._seen.append(gauges[GPU_PERCENT])

    def gauges(self, after: Scrape) -> dict[str, float]:
        """Of the run: means over its looks; of a run too short for one, what `after` shows."""
        return after.gauges | ({GPU_PERCENT: sum(self._seen) / len(self._seen)} if self._seen else {})
