"""Responses that can be asked for later, in memory: bounded in bytes and in time, and only for who holds the same key.

Those that run cannot make room for others; of those that have ended the oldest does first.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.server.responses.reply import End

LIFE_S = 3600.0  # from a response's end
_RECORD_BYTES = 1024  # what the objects of a record take beside their contents

Owner = bytes


@dataclass(slots=True)
class Record:
    """One response. `turns` are the items that it answers, JSON lists with the oldest first, shared with earlier responses.

    While it runs, `show` gives its object as it stands, and `cancel` ends it in the engine and waits until it has ended.
    """

    response_id: str
    owner: Owner
    turns: tuple[bytes, ...]
    is_background: bool
    num_reserved_bytes: int  # for the answer, while it runs
    show: Callable[[], bytes] | None = None
    cancel: Callable[[], Awaitable[None]] | None = None  # only of one that runs in the background
    end: End | None = None
    ended_s: float = 0.0

    @property
    def body(self) -> bytes:
        """The response object."""
        if self.end is not None:
            return self.end.body
        assert self.show is not None, "one that runs can be shown"
        return self.show()

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """What the next response follows."""
        return self.turns if self.end is None else (*self.turns, self.end.output)

    @property
    def num_bytes(self) -> int:
        """At most what it holds: turns that it shares with others count for each of them."""
        own = self.num_reserved_bytes if self.end is None else len(self.end.body) + len(self.end.output)
        return _RECORD_BYTES + sum(map(len, self.turns)) + own


class ResponseStore:
    """Owns the records. Used from the event loop only."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._records: dict[tuple[Owner, str], Record] = {}
        self._ended: dict[tuple[Owner, str], Record] = {}  # in the order of their ends
        self.num_bytes = 0
        self._num_running_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> bool:
        """Keep a response that begins to run; False if there is no room for it."""
        self._drop_expired()
        if self._num_running_bytes + record.num_bytes > self.max_bytes:
            return False
        self._records[record.owner, record.response_id] = record
        self.num_bytes += record.num_bytes
        self._num_running_bytes += record.num_bytes
        self._make_room()
        return True

    def get(self, owner: Owner, response_id: str) -> Record | None:
        """A response by its id; None if it is not there, not any more, or another key's."""
        self._drop_expired()
        return self._records.get((owner, response_id))

    def end(self, record: Record, end: End) -> None:
        """A response has ended; one that was removed meanwhile stays so."""
        num_before = record.num_bytes
        record.end, record.ended_s = end, self._clock()
        record.show = record.cancel = None
        key = record.owner, record.response_id
        if key in self._records:
            self._ended[key] = record
            self.num_bytes += record.num_bytes - num_before
            self._num_running_bytes -= num_before
            self._make_room()

    def remove(self, record: Record) -> None:
        """Forget a response; one that runs goes on, unless it is cancelled."""
        key = record.owner, record.response_id
        if self._records.pop(key, None) is not None:
            self.num_bytes -= record.num_bytes
            if self._ended.pop(key, None) is None:
                self._num_running_bytes -= record.num_bytes

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes and self._ended:
            self.remove(next(iter(self._ended.values())))

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._ended and now_s - (oldest := next(iter(self._ended.values()))).ended_s >= LIFE_S:
            self.remove(oldest)


def owner_of(authorization: str | None) -> Owner:
    """Whose a request is: a digest of the bearer token in its `Authorization` header, so that keys are not held; empty if there is none."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return hashlib.sha256(token.strip().encode()).digest() if scheme.lower() == "bearer" and token.strip() else b""
