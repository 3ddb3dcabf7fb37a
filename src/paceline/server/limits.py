"""How many requests are served at once and for how long: `max_concurrent_requests` and `request_timeout`. Used by the edge.

Only requests that bring work (POST) count, and the work that some of them leave behind. Probes, metrics and lists must answer above all on
a server that is full.
"""

import asyncio
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager

from starlette.types import Scope

from paceline.server.openai.errors import ErrorAnswer, busy, late_body, timed_out

_PLACE = "paceline.place"  # where an ASGI scope holds the request's Place
_CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")  # frees a place, so that a full server above all must take it


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


class Place:
    """A request's place among those that are served at once, with its clock. It is free once the answer is out, or later if it is kept."""

    def __init__(self, limits: "RequestLimits", deadline: Deadline | None) -> None:
        self.deadline = deadline
        self.is_kept = False
        self._limits = limits
        limits.num_requests += 1

    def keep(self) -> None:
        """Work goes on after the answer; the caller gives the place back."""
        self.is_kept = True

    def give_back(self) -> None:
        """Called once."""
        self._limits.num_requests -= 1
        if self.deadline is not None:
            self.deadline.stop()


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
        timeout_s = self._request_timeout_s
        place = scope[_PLACE] = Place(self, None if timeout_s is None else Deadline(timeout_s, on_passed))
        try:
            yield
        finally:
            if not place.is_kept:
                place.give_back()


def place_of(scope: Scope) -> Place:
    """The place of a request that brings work."""
    return scope[_PLACE]


def deadline_of(scope: Scope) -> Deadline | None:
    """The clock of a request; None for one without a time limit."""
    place: Place | None = scope.get(_PLACE)
    return None if place is None else place.deadline


def _brings_work(scope: Scope) -> bool:
    return scope["method"] == "POST" and not _CANCEL.fullmatch(scope["path"])
