"""The requests being answered now: who must end when a client leaves or the server stops, and since when there has been work.

`stream.py` enters each answer here; `run.py` ends them at shut-down; `health.py` asks whether there is work.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from enum import Enum, auto

from starlette.types import Receive


class Interruption(Enum):
    """Why an answer was ended from outside."""

    CLIENT_LEFT = auto()
    SHUT_DOWN = auto()
    TIMEOUT = auto()
    CANCELLED = auto()  # by a request that asks for it


class InterruptedAnswerError(Exception):
    """Raised in the task of an answer that was ended from outside."""

    def __init__(self, reason: Interruption) -> None:
        super().__init__(reason.name)
        self.reason = reason


class _Entry:
    def __init__(self, task: asyncio.Task[object], has_client: bool) -> None:
        self._task = task
        self.has_client = has_client
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
        self._background: set[asyncio.Task[None]] = set()
        self._busy_since_s = 0.0
        self.is_draining = False  # set once, when the server stops taking requests

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def busy_since_s(self) -> float | None:
        """time.monotonic() since when at least one answer has been running; None while there is none."""
        return self._busy_since_s if self._entries else None

    @contextmanager
    def answering(self, receive: Receive | None) -> Generator[Callable[[Interruption], None]]:
        """Run the body as an answer: it is interrupted when the client leaves, the server stops, or by the function that it gets.

        `receive`: None for an answer that no client waits for. Raises InterruptedAnswerError when interrupted. A cancellation from
        elsewhere passes through.
        """
        task = asyncio.current_task()
        assert task is not None
        entry = _Entry(task, has_client=receive is not None)
        if not self._entries:
            self._busy_since_s = time.monotonic()
        self._entries.add(entry)
        watcher = None if receive is None else asyncio.create_task(entry.watch(receive))
        try:
            yield entry.interrupt
        except asyncio.CancelledError:
            if entry.reason is None:
                raise
            task.uncancel()
            raise InterruptedAnswerError(entry.reason) from None
        finally:
            if watcher is not None:
                watcher.cancel()
            self._entries.discard(entry)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work`, which is `answering` without a client."""
        task = asyncio.create_task(work)
        self._background.add(task)  # the event loop itself does not keep tasks
        task.add_done_callback(self._background.discard)
        return task

    async def end_background(self) -> None:
        """End the answers that no client waits for, and wait until they have."""
        await asyncio.sleep(0)  # one that was started just now must be answering before it can be interrupted
        for entry in tuple(self._entries):
            if not entry.has_client:
                entry.interrupt(Interruption.SHUT_DOWN)
        if self._background:
            await asyncio.wait(self._background)

    def interrupt_all(self) -> None:
        """End all answers now, each with an error that says why."""
        for entry in tuple(self._entries):
            entry.interrupt(Interruption.SHUT_DOWN)
