"""How conversations are put to a server: so many at a time, or as they happen to arrive. Called by `measure.py` for each block.

A conversation holds one slot from its first turn to its last, and its history is the model's own answers.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from paceline.prove.client import Answer, Message
from paceline.prove.datasets.prompt import Prompt

Send = Callable[[Prompt, int, Sequence[Message]], Awaitable[Answer]]
"""Sends turn number `int` of a conversation whose messages so far are given."""


async def converse(prompt: Prompt, send: Send) -> None:
    """All turns of one conversation, one after the other; none after an answer that is not whole, for it lacks its history."""
    messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": text})
        answer = await send(prompt, turn, tuple(messages))
        if answer.error is not None:
            return
        messages.append({"role": "assistant", "content": answer.content})


async def closed_loop(prompts: Sequence[Prompt], concurrency: int, send: Send) -> None:
    """`concurrency` conversations in flight as long as there are so many left; returns when all are over."""
    waiting = iter(prompts)

    async def slot() -> None:
        for prompt in waiting:  # shared: each slot takes the next one
            await converse(prompt, send)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(slot())


async def open_loop(prompts: Sequence[Prompt], rate_per_s: float, seed: str, send: Send) -> None:
    """Conversations begin at the times of a Poisson process, however many are still running; returns when all are over."""
    start_s = asyncio.get_running_loop().time()

    async def arrive(prompt: Prompt, at_s: float) -> None:
        await asyncio.sleep(start_s + at_s - asyncio.get_running_loop().time())
        await converse(prompt, send)

    async with asyncio.TaskGroup() as group:
        for prompt, at_s in zip(prompts, arrivals_s(len(prompts), rate_per_s, seed), strict=True):
            group.create_task(arrive(prompt, at_s))


def arrivals_s(number: int, rate_per_s: float, seed: str) -> tuple[float, ...]:
    """Seconds from the start of each arrival; the first is at once. The same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    times, now_s = [0.0], 0.0
    for _ in range(number - 1):
        now_s += rng.expovariate(rate_per_s)
        times.append(now_s)
    return tuple(times[:number])


class LagMeter:
    """How late this process's own event loop is: a late reader adds its lateness to every time it measures."""

    _INTERVAL_S = 0.02
    _BIN_S = 1e-4
    _NUM_BINS = 10_000  # up to a second; what is later counts as a second

    def __init__(self) -> None:
        self._bins = [0] * (self._NUM_BINS + 1)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def p99_ms(self) -> float:
        """99 % of the looks at the clock were at most so late; 0 before the first."""
        num_wanted = sum(self._bins) * 0.99
        num_seen = 0
        for index, number in enumerate(self._bins):
            num_seen += number
            if num_seen >= num_wanted and num_seen:
                return index * self._BIN_S * 1e3
        return 0.0

    def add(self, late_s: float) -> None:
        self._bins[min(max(int(late_s / self._BIN_S), 0), self._NUM_BINS)] += 1

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + self._INTERVAL_S
            await asyncio.sleep(self._INTERVAL_S)
            self.add(time.monotonic() - due_s)
