"""Server-sent events out of bytes, however a network cut them. Used by `client.py` for every chunk, so it does little.

By the WHATWG's rules as far as servers need them, and kinder where nothing can be misread: see `Events.close`.
"""

from paceline.errors import PacelineError

MAX_EVENT_BYTES = 16 * 1024 * 1024  # a server that never ends a line must not fill the memory


class BrokenStreamError(PacelineError):
    """What came is no stream of events, or holds one without an end."""


class Events:
    """Feed it bytes, and it gives the payloads of the events that they complete."""

    __slots__ = ("_data", "_is_error", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line
        self._data: list[bytes] = []  # the data lines of an event without an end
        self._is_error = False  # the event is named `error`

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """(payload, whether it tells an error) of each event that ends here. Raises BrokenStreamError for one beyond the limit."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[tuple[bytes, bool]] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line:
                self._line(line)
            elif self._data:
                events.append(self._take())
            else:
                self._is_error = False
        if len(self._rest) > MAX_EVENT_BYTES or sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise BrokenStreamError(f"an event of the stream is longer than {MAX_EVENT_BYTES:,} bytes")
        return events

    def close(self) -> list[tuple[bytes, bool]]:
        """The last event, if the body ended in good order but without the empty line that should end an event."""
        return self.feed(b"\n\n") if self._rest or self._data else []

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"error":  # llama.cpp's way to tell one
            self._data.append(value)
            self._is_error = True
        elif name == b"event" and value == b"error":
            self._is_error = True

    def _take(self) -> tuple[bytes, bool]:
        event = (b"\n".join(self._data), self._is_error)
        self._data, self._is_error = [], False
        return event
