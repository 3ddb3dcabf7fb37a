"""A `ToyEngine` in the server's own event loop: the whole path from HTTP to the sampler, with real drafters and no second process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from paceline.core.facts import EngineFacts
from paceline.core.outcome import TokenDelta
from paceline.core.request import Request
from paceline.core.stats import EngineStats
from tests.fakes.toy_engine import ToyEngine


class LoopEngine:
    """Has the shape of `engine.client.EngineClient`. Steps whenever a request runs, and lets others have the event loop in between.

    `answers` records each request with its output tokens.
    """

    is_alive = True

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self.answers: list[tuple[Request, list[int]]] = []
        self._queues: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def submit(
        self, request: Request, sink: Callable[[TokenDelta, Sequence[TokenDelta]], bool] | None = None
    ) -> AsyncGenerator[TokenDelta, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        output: list[int] = []
        self.answers.append((request, output))
        self._engine.loop.add(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            while True:
                delta = await queue.get()
                output += delta.token_ids
                if sink is None or not sink(delta, ()):
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._engine.loop.abort(request.request_id)
            del self._queues[request.request_id]

    async def _step(self) -> None:
        while self._engine.loop.has_unfinished:
            for delta in self._engine.loop.step():
                if delta.request_id in self._queues:
                    self._queues[delta.request_id].put_nowait(delta)
            await asyncio.sleep(0)
