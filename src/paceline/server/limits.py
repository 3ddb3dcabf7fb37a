"""How many requests are served at once and for how long: `max_concurrent_requests` and `request_timeout`. Used by the edge.

Only requests that bring work (POST) count. Probes, metrics and lists must answer above all on a server that is full.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from starlette.types import Scope

from paceline.server.openai.errors import ErrorAnswer, busy, late_body, timed_out

_DEADLINE = "paceline.deadline"  # where an ASGI scope holds the request's Deadline


class Deadline:
    """A request's clock: calls `on_passed` once the time is up. Who takes the request over may bring another way to end it."""

    def __init__(self, timeout_s: float, on_passed: Callable[[], None]) -> None:
        self.answer = timed_out(timeout_s)  # to a request of which nothing has been sent
        self._on_passed = on_passed
        self._timer = asyncio.get_running_loop().call_later(timeout_s, lambda: self._on_passed())

    def take_over(self, on_passed: Callable[[], None]) -> None:
        """From now on call this instead."""
        self._on_passed = on_passed

    def stop(self) -> None:
        self._timer.cancel()


class RequestLimits:
    """The requests that are being served, from their headers to the last byte of the answer."""

    def __init__(self, max_concurrent_requests: int | None, request_timeout_s: float | None) -> None:
        """None is no limit."""
        self.max_concurrent_requests = max_concurrent_requests
        self.num_requests = 0
        self._request_timeout_s = request_timeout_s

    def refusal(self, scope: Scope) -> ErrorAnswer | None:
        """What to tell a request for which there is no place now."""
        limit = self.max_concurrent_requests
        return None if limit is None or self.num_requests < limit or not _brings_work(scope) else busy(limit)

    def late_answer(self, has_body: bool) -> ErrorAnswer:
        """What to tell a request whose time was up before its answer began; without its body the client was late, not the server."""
        assert self._request_timeout_s is not None
        return timed_out(self._request_timeout_s) if has_body else late_body(self._request_timeout_s)

    @contextmanager
    def serving(self, scope: Scope, on_passed: Callable[[], None]) -> Generator[None]:
        """Serve a request in the body: it takes a place, and `on_passed` is called if it takes too long. `deadline_of` has its clock."""
        if not _brings_work(scope):
            yield
            return
        self.num_requests += 1
        deadline = None
        if self._request_timeout_s is not None:
            deadline = scope[_DEADLINE] = Deadline(self._request_timeout_s, on_passed)
        try:
            yield
        finally:
            self.num_requests -= 1
            if deadline is not None:
                deadline.stop()


def deadline_of(scope: Scope) -> Deadline | None:
    """The clock of a request; None for one without a time limit."""
    return scope.get(_DEADLINE)


def _brings_work(scope: Scope) -> bool:
    return scope["method"] == "POST"
