"""`<think>...</think>` before the answer, whose own format another parser reads. DeepSeek-R1, Qwen 3 and most models since write it so.

Only a block at the beginning counts: an answer may speak about the tags.
"""

from collections.abc import Sequence
from enum import Enum, auto

from paceline.server.parsing.deltas import MessageDelta, OutputParser, ReasoningDelta
from paceline.server.parsing.text import ExpectedTag, TagFinder, TextChannel, end_of_space

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class _Place(Enum):
    START = auto()
    REASONING = auto()
    BEFORE_ANSWER = auto()
    ANSWER = auto()


class ReasoningParser:
    """White space at the borders of the block is left out. A block that is cut off is reasoning to its end."""

    def __init__(self, answer: OutputParser, is_open: bool) -> None:
        """`answer` reads what follows. `is_open`: the prompt ends in the opening tag, so the output begins inside."""
        self._answer = answer
        self._is_open = is_open
        self._place = _Place.START
        self._reasoning = TextChannel(ReasoningDelta, is_trimmed=True)
        self._open_tag = ExpectedTag(OPEN_TAG)
        self._close_tag = TagFinder(CLOSE_TAG)

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    def feed(self, text: str) -> Sequence[MessageDelta]:
        if self._place is _Place.ANSWER:
            return self._answer.feed(text)
        deltas: list[MessageDelta] = []
        position = 0
        while position < len(text):
            if self._place is _Place.START:
                position = self._read_start(text, position, deltas)
            elif self._place is _Place.REASONING:
                position = self._read_reasoning(text, position, deltas)
            elif self._place is _Place.BEFORE_ANSWER:
                position = end_of_space(text, position)
                if position < len(text):
                    self._place = _Place.ANSWER
            else:
                deltas += self._answer.feed(text[position:])
                position = len(text)
        return deltas

    def finish(self) -> Sequence[MessageDelta]:
        deltas: list[MessageDelta] = []
        if self._place is _Place.START:
            self._read_no_tag(deltas)
        self._reasoning.push(self._close_tag.flush(), deltas)
        deltas += self._answer.finish()
        return deltas

    def _read_start(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        position, is_there = self._open_tag.take(text, start)
        if is_there:
            self._place = _Place.REASONING
        elif is_there is False:
            self._read_no_tag(deltas)
        return position

    def _read_no_tag(self, deltas: list[MessageDelta]) -> None:
        """The opening tag is not there: what was taken as its beginning is text."""
        if self._is_open:
            self._reasoning.push(self._open_tag.spaces, deltas)
            self._reasoning.push(self._close_tag.resume(self._open_tag.part), deltas)
            self._place = _Place.REASONING
        else:
            deltas += self._answer.feed(self._open_tag.taken)
            self._place = _Place.ANSWER

    def _read_reasoning(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        reasoning, position, is_found = self._close_tag.find(text, start)
        self._reasoning.push(reasoning, deltas)
        if is_found:
            self._place = _Place.BEFORE_ANSWER
        return position
