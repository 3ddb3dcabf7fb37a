"""What the server needs of an engine. `engine.client.EngineClient` has this shape; tests bring a fake one."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from paceline.core.facts import EngineFacts
from paceline.core.outcome import TokenDelta
from paceline.core.request import Request
from paceline.core.stats import EngineStats


class Engine(Protocol):
    """A running engine, used from one event loop."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def is_alive(self) -> bool: ...

    def stats(self) -> EngineStats:
        """The latest report, at most a step or 250 ms old."""
        ...

    def submit(self, request: Request, sink: Callable[[TokenDelta, Sequence[TokenDelta]], bool] | None = None) -> AsyncIterator[TokenDelta]:
        """Run a request; the last delta has a finish reason.

        `sink` is offered each delta that comes while the reader waits, with those behind it, and says whether it took them in its place.
        An async generator: closing it early aborts the request. Raises EngineDeadError when the engine is or goes away.
        """
        ...
