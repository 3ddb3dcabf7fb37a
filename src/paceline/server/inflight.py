"""The requests being answered now: who must end when a client leaves or the server stops, and since when there has been work.

`stream.py` enters each answer here; `run.py` ends them at shut-down; `health.py` asks whether there is work.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum, auto

from starlette.types import Receive


class Interruption(Enum):
    """Why an answer was ended from outside."""

    CLIENT_LEFT = auto()
    SHUT_DOWN = auto()
    TIMEOUT = auto()


class InterruptedAnswerError(Exception):
    """Raised in the task of an answer that was ended from outside."""

    def __init__(self, reason: Interruption) -> None:
        super().__init__(reason.name)
        self.reason = reason


class _Entry:
    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.reason: Interruption | None = None

    def interrupt(self, reason: Interruption) -> None:
        if self.reason is None:
            self.reason = reason
            self._task.cancel()

    async def watch(self, receive: Receive) -> None:
        """Interrupt as soon as the client is gone. The body has been read, so nothing else can come."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(Interruption.CLIENT_LEFT)


class InFlight:
    """All running answers of this server."""

    def __init__(self) -> None:
        self._entries: set[_Entry] = set()
        self._busy_since_s = 0.0
        self.is_draining = False  # set once, when the server stops taking requests

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def busy_since_s(self) -> float | None:
        """time.monotonic() since when at least one answer has been running; None while there is none."""
        return self._busy_since_s if self._entries else None

    @contextmanager
    def answering(self, receive: Receive) -> Generator[Callable[[Interruption], None]]:
        """Run the body as an answer: it is interrupted when the client leaves, the server stops, or by the function that it gets.

        Raises InterruptedAnswerError then. A cancellation from elsewhere passes through.
        """
        task = asyncio.current_task()
        assert task is not None
        entry = _Entry(task)
        if not self._entries:
            self._busy_since_s = time.monotonic()
        self._entries.add(entry)
        watcher = asyncio.create_task(entry.watch(receive))
        try:
            yield entry.interrupt
        except asyncio.CancelledError:
            if entry.reason is None:
                raise
            task.uncancel()
            raise InterruptedAnswerError(entry.reason) from None
        finally:
            watcher.cancel()
            self._entries.discard(entry)

    def interrupt_all(self) -> None:
        """End all answers now, each with an error that says why."""
        for entry in tuple(self._entries):
            entry.interrupt(Interruption.SHUT_DOWN)
