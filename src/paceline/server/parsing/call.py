"""One tool call as models write it: a JSON object with a name and arguments. Used by the parsers of formats that have such calls.

Arguments leave as they come, as the model wrote them. Text that turns out to be no call is kept whole, to become content.
"""

import secrets
from collections.abc import Callable, Collection
from enum import Enum, auto

import msgspec

from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, MessageDelta
from paceline.server.parsing.json_scanner import JsonScanner, Mark

_ARGUMENT_KEYS = ("arguments", "parameters")
_UNMARKED_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")
_NUM_ID_BYTES = 12


def new_call_id() -> str:
    """An id as OpenAI's clients expect it; unique, because later turns refer to it."""
    return f"call_{secrets.token_hex(_NUM_ID_BYTES)}"


class Calls:
    """The calls of one answer: their numbers, their ids, and which tools there are."""

    __slots__ = ("_new_id", "_num_started", "_tool_names")

    def __init__(self, tool_names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._tool_names = frozenset(tool_names)
        self._new_id = new_id
        self._num_started = 0

    def start(self, name: str) -> CallStart:
        """The next call."""
        self._num_started += 1
        return CallStart(self._num_started - 1, self._new_id(), name)

    def has_tool(self, name: str) -> bool:
        return name in self._tool_names


class Outcome(Enum):
    """How far a call is."""

    OPEN = auto()
    MADE = auto()
    BROKEN = auto()


class _Member(Enum):
    """What is being read of the call's object."""

    NONE = auto()  # punctuation, or a member that no call needs, such as "type"
    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()


class CallReader:
    """Reads one call. `outcome` says whether it is one."""

    __slots__ = (
        "_calls",
        "_has_arguments",
        "_is_marked",
        "_key",
        "_member",
        "_name",
        "_pending",
        "_scanner",
        "_source",
        "_start",
        "_string",
        "outcome",
    )

    def __init__(self, calls: Calls, lead: str, is_marked: bool) -> None:
        """`lead` is the text of the call that is already read, such as its tag.

        `is_marked`: a tag says that this is a call. Without one it may as well be an answer in JSON, so it must have arguments, the name
        of a tool that exists and no strange members; most answers are told from calls by their first key. With a tag, a wrong name is
        for the client to tell the model, and no arguments are empty ones.
        """
        self._calls = calls
        self._is_marked = is_marked
        self._source = [lead]
        self._scanner = JsonScanner()
        self._member = _Member.NONE
        self._string: list[str] = []  # the key or name being read
        self._key = ""
        self._name: str | None = None
        self._has_arguments = False
        self._pending: list[str] = []  # arguments that have not left yet
        self._start: CallStart | None = None
        self.outcome = Outcome.OPEN

    @property
    def source(self) -> str:
        """All text read, the lead included."""
        return "".join(self._source)

    def read(self, text: str, start: int, deltas: list[MessageDelta]) -> int:
        """Read from `start` on, add what is certain to `deltas`, and return where the call ends, or the text that is none."""
        position = start
        while self.outcome is Outcome.OPEN and position < len(text):
            begin = position
            position, mark = self._scanner.scan(text, begin)
            if self._member is _Member.ARGUMENTS:
                self._pending.append(text[begin:position])
            elif self._member is not _Member.NONE:
                self._string.append(text[begin:position])
            self._on_mark(mark, text[position - 1])
        self._source.append(text[start:position])
        self._flush(deltas)
        if self.outcome is Outcome.BROKEN:
            self.abandon(deltas)
        return position

    def abandon(self, deltas: list[MessageDelta]) -> None:
        """This is no call, or will not become one because no text follows."""
        self.outcome = Outcome.BROKEN
        if self._start is not None:
            deltas.append(CallBroken(self._start.index))

    def _on_mark(self, mark: Mark, character: str) -> None:
        """`character` is the last one read."""
        if mark is Mark.BAD:
            self.outcome = Outcome.BROKEN
        elif mark is Mark.KEY_START:
            self._member, self._string = _Member.KEY, [character]
        elif mark is Mark.KEY_END:
            self._end_key()
        elif mark is Mark.VALUE_START:
            self._begin_value(character)
        elif mark is Mark.VALUE_END:
            self._end_value()
        elif mark is Mark.END:
            self._end()

    def _end_key(self) -> None:
        key = _decode("".join(self._string))
        self._member = _Member.NONE
        if key is None or not (self._is_marked or key in _UNMARKED_KEYS):
            self.outcome = Outcome.BROKEN
        else:
            self._key = key

    def _begin_value(self, character: str) -> None:
        if self._key == "name":
            if character != '"' or self._name is not None:
                self.outcome = Outcome.BROKEN
            self._member, self._string = _Member.NAME, [character]
        elif self._key in _ARGUMENT_KEYS:
            if character != "{" or self._has_arguments:
                self.outcome = Outcome.BROKEN
            else:
                self._member, self._has_arguments = _Member.ARGUMENTS, True
                self._pending.append(character)

    def _end_value(self) -> None:
        member, self._member = self._member, _Member.NONE
        if member is _Member.NAME:
            self._name = _decode("".join(self._string))
            if not self._name or not (self._is_marked or self._calls.has_tool(self._name)):
                self.outcome = Outcome.BROKEN
                self._name = None
        elif member is _Member.ARGUMENTS:
            self._pending[-1] = self._pending[-1][:-1]  # the brace that makes them JSON waits for the end of the call

    def _end(self) -> None:
        if self._name is None or not (self._has_arguments or self._is_marked):
            self.outcome = Outcome.BROKEN
            return
        self._pending.append("}" if self._has_arguments else "{}")
        self._has_arguments = True
        self.outcome = Outcome.MADE

    def _flush(self, deltas: list[MessageDelta]) -> None:
        if self._name is None or not self._has_arguments:
            return
        if self._start is None:
            self._start = self._calls.start(self._name)
            deltas.append(self._start)
        text = "".join(self._pending)
        self._pending.clear()
        if text:
            deltas.append(CallArguments(self._start.index, text))


def _decode(string: str) -> str | None:
    """A JSON string's text; None for half a surrogate pair, which JSON can write and text cannot hold."""
    try:
        return msgspec.json.decode(string, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
