"""An answer that may call one tool only: everything behind its first whole call is left out. Around any other parser."""

from collections.abc import Sequence

from paceline.server.parsing.deltas import MessageDelta, OutputParser


class OneCallParser:
    """Reads character by character, because only the other parser knows where the first call ends."""

    def __init__(self, answer: OutputParser) -> None:
        self._answer = answer

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    def feed(self, text: str) -> Sequence[MessageDelta]:
        deltas: list[MessageDelta] = []
        for character in text:
            if self._answer.num_calls:
                break
            deltas += self._answer.feed(character)
        return deltas

    def finish(self) -> Sequence[MessageDelta]:
        return () if self._answer.num_calls else self._answer.finish()
