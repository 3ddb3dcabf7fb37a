"""Server-sent events of a response, numbered in their order. A delta of text is glued from prepared bytes: there is one per step."""

import msgspec

from paceline.server.openai.errors import ErrorAnswer

_encode = msgspec.json.encode


class Events:
    """Collects the events of one response until they are sent. A silent one collects nothing, for answers that do not stream."""

    __slots__ = ("_num_events", "_unsent", "is_silent")

    def __init__(self, is_silent: bool) -> None:
        self.is_silent = is_silent
        self._num_events = 0
        self._unsent: list[bytes] = []

    def take(self) -> bytes:
        """What is new since the last call."""
        taken = b"".join(self._unsent)
        self._unsent.clear()
        return taken

    def say(self, kind: str, fields: dict[str, object]) -> None:
        if not self.is_silent:
            self._add(kind.encode(), _encode(fields)[1:-1])

    def say_response(self, kind: str, response: bytes) -> None:
        """An event about the response as a whole."""
        if not self.is_silent:
            self._add(kind.encode(), b'"response":' + response)

    def say_delta(self, kind: bytes, place: bytes, text: str, logprobs: bytes | None = None) -> None:
        """More of a text. `place`: encoded fields that say of which one; `logprobs`: a JSON list, None for texts that have none."""
        if not self.is_silent:
            delta = place + b',"delta":' + _encode(text)
            self._add(kind, delta if logprobs is None else delta + b',"logprobs":' + logprobs)

    def say_error(self, error: ErrorAnswer) -> None:
        """The stream is broken. As an event's own fields, and as the object `error`, by which clients tell that they must raise."""
        nested = msgspec.json.decode(error.body, type=dict[str, dict[str, object]])["error"]
        self.say("error", {**{name: nested[name] for name in ("code", "message", "param")}, "error": nested})

    def _add(self, kind: bytes, fields: bytes) -> None:
        self._unsent.append(
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, self._num_events, fields),
        )
        self._num_events += 1
