"""A server's Prometheus counters before and after a block, and whether it is busy. Called by `measure.py`.

Counters only, by their `_total` names: a `_created` gauge summed as a counter has fooled other clients. Sums over label sets.
"""

import asyncio
import math
import re
import time
from dataclasses import dataclass, field

from paceline.errors import MissingError
from paceline.prove.client import ChatClient

GENERATION_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
NUM_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
NUM_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
NUM_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
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
_PATHS = ("/metrics", "/prometheus/metrics")
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?\s+([^\s]+)")
_POSITION = re.compile(r'(?:position|token_position)="(\d{1,4})"')
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one look at `/metrics` found; empty where the server has none."""

    counters: dict[str, float] = field(default_factory=dict[str, float])  # accepted tokens per position as `name{position="0"}`
    num_busy: int | None = None  # requests running or waiting; None: it does not say


def parse(text: str) -> Scrape:
    """The samples that matter here of an exposition in Prometheus' text format."""
    counters: dict[str, float] = {}
    num_busy: float | None = None
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None or sample[1] not in _COUNTERS | _BUSY_GAUGES:
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
        if name == NUM_ACCEPTED_PER_POSITION and (position := _POSITION.search(sample[2] or "")):
            name = f'{name}{{position="{position[1]}"}}'
        counters[name] = counters.get(name, 0.0) + value
    return Scrape(counters, None if num_busy is None else int(num_busy))


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
            if scrape.counters or scrape.num_busy is not None:
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
