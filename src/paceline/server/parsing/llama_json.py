"""Answers that are calls: `{"name": ..., "parameters": {...}}` and nothing else, several with `;` between them.

The format of Llama 3.1 and later, which write it with or without `<|python_tag|>` before it.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto

from paceline.server.parsing.call import CallReader, Calls, Outcome
from paceline.server.parsing.deltas import ContentDelta, MessageDelta
from paceline.server.parsing.json_scanner import SPACE
from paceline.server.parsing.text import ExpectedTag, TextChannel

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(f"[{SPACE};]*")


class _Place(Enum):
    START = auto()
    CALL = auto()
    AFTER_CALL = auto()
    TEXT = auto()  # to the end: calls stand only at the beginning


class LlamaJsonParser:
    """An answer without the tag is a call only if it names a tool that exists: any other JSON may be what the user asked for."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._place = _Place.START
        self._content = TextChannel(ContentDelta, is_trimmed=False)
        self._python_tag = ExpectedTag(PYTHON_TAG)
        self._is_marked = False
        self._call = CallReader(calls, "", is_marked=False)
        self._between: list[str] = []  # white space and semicolons after a call
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
            elif self._place is _Place.CALL:
                position = self._read_call(text, position, deltas)
            elif self._place is _Place.AFTER_CALL:
                position = self._read_after_call(text, position, deltas)
            else:
                self._content.push(text[position:], deltas)
                position = len(text)
        return deltas

    def finish(self) -> Sequence[MessageDelta]:
        deltas: list[MessageDelta] = []
        if self._place is _Place.START:
            self._content.push(self._python_tag.taken, deltas)
        elif self._place is _Place.CALL:
            self._call.abandon(deltas)
            self._content.push(self._call.source, deltas)
        self._content.end(deltas)
        return deltas

    def _read_start(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        position, is_there = self._python_tag.take(text, start)
        if is_there is None:
            return position
        taken = self._python_tag.taken
        if is_there or not self._python_tag.part:
            self._is_marked = is_there
            self._begin_call(taken)
        else:
            self._content.push(taken, deltas)
            self._place = _Place.TEXT
        return position

    def _begin_call(self, lead: str) -> None:
        self._call = CallReader(self._calls, lead, self._is_marked)
        self._place = _Place.CALL

    def _read_call(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        position = self._call.read(text, start, deltas)
        if self._call.outcome is Outcome.MADE:
            self._num_calls += 1
            self._content.trim()
            self._between.clear()
            self._place = _Place.AFTER_CALL
        elif self._call.outcome is Outcome.BROKEN:
            self._content.push(self._call.source, deltas)
            self._place = _Place.TEXT
        return position

    def _read_after_call(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        run = _BETWEEN.match(text, start)
        assert run is not None
        self._between.append(run.group())
        if run.end() < len(text):
            self._begin_call("".join(self._between))  # what begins no object becomes content at once
        return run.end()
