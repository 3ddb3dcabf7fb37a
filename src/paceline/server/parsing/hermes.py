"""Calls in tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with or without text around them.

The format of Hermes 2 Pro and later, Qwen 2.5 and Qwen 3, and of models trained on their templates. Small ones forget
the tags, and those trained on code write a block of code instead.
"""

from collections.abc import Sequence
from enum import Enum, auto

from paceline.server.parsing.call import CallReader, Calls, Outcome
from paceline.server.parsing.deltas import ContentDelta, MessageDelta
from paceline.server.parsing.text import ExpectedTag, TagFinder, TextChannel

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
_OPEN_FENCE = "```json"
_CLOSE_FENCE = "```"


class _Place(Enum):
    START = auto()  # of the answer, or after a call without tags
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class HermesParser:
    """White space beside calls is left out. A call may lack its closing tag: models leave it out at the end of an answer.

    At the beginning of the answer it may lack both tags, or stand in a block of code, if it names a tool that exists.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._place = _Place.START
        self._content = TextChannel(ContentDelta, is_trimmed=False)
        self._open_tag = TagFinder(OPEN_TAG)
        self._open_fence = ExpectedTag(_OPEN_FENCE)
        self._close_tag: ExpectedTag | None = None  # what should follow the call, or its fence; None: nothing
        self._call = CallReader(calls, "", is_marked=False)
        self._is_marked = False  # the call
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> Sequence[MessageDelta]:
        deltas: list[MessageDelta] = []
        position = 0
        while position < len(text):
            if self._place is _Place.START:
                position = self._read_start(text, position, deltas)
            elif self._place is _Place.TEXT:
                position = self._read_text(text, position, deltas)
            elif self._place is _Place.CALL:
                position = self._read_call(text, position, deltas)
            else:
                position = self._read_after_call(text, position, deltas)
        return deltas

    def finish(self) -> Sequence[MessageDelta]:
        deltas: list[MessageDelta] = []
        if self._place is _Place.START:
            self._content.push(self._open_fence.taken, deltas)
        elif self._place is _Place.TEXT:
            self._content.push(self._open_tag.flush(), deltas)
        elif self._place is _Place.CALL:
            self._call.abandon(deltas)
            self._content.push(self._call.source, deltas)
        elif self._close_tag is not None and self._close_tag.part:
            self._content.push(self._close_tag.taken, deltas)
        self._content.end(deltas)
        return deltas

    def _read_start(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        position, is_there = self._open_fence.take(text, start)
        if is_there is None:
            return position
        taken = self._open_fence.taken
        if is_there:
            self._begin_call(taken, is_marked=False, closing=_CLOSE_FENCE)
        elif not self._open_fence.part and text[position] == "{":
            self._begin_call(taken, is_marked=False, closing="")
        else:
            self._content.push(taken, deltas)
            self._place = _Place.TEXT
        return position

    def _read_text(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        content, position, is_found = self._open_tag.find(text, start)
        self._content.push(content, deltas)
        if is_found:
            self._begin_call(OPEN_TAG, is_marked=True, closing=CLOSE_TAG)
        return position

    def _begin_call(self, lead: str, is_marked: bool, closing: str) -> None:
        self._call = CallReader(self._calls, lead, is_marked)
        self._is_marked = is_marked
        self._close_tag = ExpectedTag(closing) if closing else None
        self._place = _Place.CALL

    def _read_call(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        position = self._call.read(text, start, deltas)
        if self._call.outcome is Outcome.MADE:
            self._num_calls += 1
            self._content.trim()
            self._open_fence = ExpectedTag(_OPEN_FENCE)
            self._place = _Place.START if self._close_tag is None else _Place.AFTER_CALL
        elif self._call.outcome is Outcome.BROKEN:
            self._content.push(self._call.source, deltas)
            self._place = _Place.TEXT
        return position

    def _read_after_call(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        assert self._close_tag is not None
        position, is_there = self._close_tag.take(text, start)
        if is_there:
            self._place = _Place.TEXT if self._is_marked else _Place.START
        elif is_there is False:
            self._content.push(self._close_tag.spaces, deltas)
            self._content.push(self._open_tag.resume(self._close_tag.part), deltas)
            self._place = _Place.TEXT
        return position
