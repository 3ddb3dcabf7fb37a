"""At most one call in an answer, for requests that want no calls in parallel: whatever follows the first whole call is left out."""

from collections.abc import Sequence

from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, MessageDelta, OutputParser


class OneCallParser:
    """Passes on what another parser says, up to and with its first whole call. A call that breaks off does not count."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._begun: int | None = None  # the call that has begun and is not broken
        self._is_done = False

    @property
    def num_calls(self) -> int:
        return int(self._is_done)

    def feed(self, text: str) -> Sequence[MessageDelta]:
        return [] if self._is_done else self._first_call(self._parser.feed(text))

    def finish(self) -> Sequence[MessageDelta]:
        return [] if self._is_done else self._parser.finish()

    def _first_call(self, parts: Sequence[MessageDelta]) -> Sequence[MessageDelta]:
        """`parts` without what follows the first whole call. Calls come one after the other, so that one is followed by another only if it
        is whole; of the last one the parser's count tells."""
        for index, part in enumerate(parts):
            if isinstance(part, CallBroken):
                self._begun = None
            elif isinstance(part, CallStart) and self._begun is None:
                self._begun = part.index
            elif self._begun is not None and not (isinstance(part, CallArguments) and part.index == self._begun):
                self._is_done = True
                return parts[:index]
        self._is_done = self._parser.num_calls > 0
        return parts
