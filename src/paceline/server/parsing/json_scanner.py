"""Checks a JSON object while its text comes, and says where its members begin and end. Used by `call.py`; builds no values.

The grammar is RFC 8259's, with a bound on nesting. A fixed cost per character: nothing is read twice, however the text is cut.
"""

import re
from enum import Enum, auto

MAX_DEPTH = 64

SPACE = " \t\n\r"  # white space in JSON, and around tags
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSING = {"{": "}", "[": "]"}


class Mark(Enum):
    """Why `scan` stopped. Keys and values are those of the outermost object; a number or literal has no VALUE_END."""

    MORE = auto()  # all text is read
    KEY_START = auto()
    KEY_END = auto()
    VALUE_START = auto()
    VALUE_END = auto()
    END = auto()  # the object is closed
    BAD = auto()  # the next character cannot follow


class _State(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    NEXT = auto()  # after a value: a comma or the end
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class _Number(Enum):
    """How far a number is."""

    MINUS = auto()
    ZERO = auto()
    INTEGER = auto()
    POINT = auto()
    FRACTION = auto()
    EXPONENT = auto()
    SIGN = auto()
    POWER = auto()


_EXPONENT = dict.fromkeys("eE", _Number.EXPONENT)
_POWER = dict.fromkeys("0123456789", _Number.POWER)
_FRACTION = dict.fromkeys("0123456789", _Number.FRACTION)
_FIRST_DIGIT = {"0": _Number.ZERO} | dict.fromkeys("123456789", _Number.INTEGER)
_NUMBER_STARTS = {"-": _Number.MINUS} | _FIRST_DIGIT
_NUMBER_NEXT: dict[_Number, dict[str, _Number]] = {
    _Number.MINUS: _FIRST_DIGIT,
    _Number.ZERO: {".": _Number.POINT} | _EXPONENT,
    _Number.INTEGER: dict.fromkeys("0123456789", _Number.INTEGER) | {".": _Number.POINT} | _EXPONENT,
    _Number.POINT: _FRACTION,
    _Number.FRACTION: _FRACTION | _EXPONENT,
    _Number.EXPONENT: dict.fromkeys("+-", _Number.SIGN) | _POWER,
    _Number.SIGN: _POWER,
    _Number.POWER: _POWER,
}
_NUMBER_ENDS = frozenset((_Number.ZERO, _Number.INTEGER, _Number.FRACTION, _Number.POWER))


class JsonScanner:
    """One JSON object, white space before it allowed."""

    __slots__ = ("_closings", "_is_key", "_num_hex", "_number", "_rest", "_state")

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._closings: list[str] = []  # of the open objects and arrays
        self._is_key = False  # of the string that is open
        self._num_hex = 0  # digits that a \u still needs
        self._rest: str = ""  # letters that a literal still needs
        self._number = _Number.MINUS

    def scan(self, text: str, start: int) -> tuple[int, Mark]:
        """Read from `start` to the next mark: where reading stopped, and why.

        The character that made a mark is read (so a value's first one is at the returned position - 1), except that of BAD.
        """
        position = start
        while position < len(text):
            if self._state is _State.STRING:
                run = _STRING_RUN.match(text, position)
                assert run is not None
                position = run.end()
                if position == len(text):
                    break
            mark = self._take(text[position])
            if mark is Mark.BAD:
                return position, mark
            position += 1
            if mark is not None:
                return position, mark
        return position, Mark.MORE

    def _take(self, character: str) -> Mark | None:
        state = self._state
        if state is _State.NUMBER:
            number = _NUMBER_NEXT[self._number].get(character)
            if number is not None:
                self._number = number
                return None
            if self._number not in _NUMBER_ENDS:
                return Mark.BAD
            state = self._state = _State.NEXT  # only what follows a number ends it
        if state in (_State.STRING, _State.ESCAPE, _State.HEX, _State.LITERAL):
            return self._take_inside(character, state)
        return None if character in SPACE else self._take_structure(character, state)

    def _take_inside(self, character: str, state: _State) -> Mark | None:
        """Inside a string or literal, where white space counts."""
        if state is _State.LITERAL:
            if character != self._rest[0]:
                return Mark.BAD
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = _State.NEXT
        elif state is _State.HEX:
            if character not in _HEX_DIGITS:
                return Mark.BAD
            self._num_hex -= 1
            if self._num_hex == 0:
                self._state = _State.STRING
        elif state is _State.ESCAPE:
            if character == "u":
                self._state, self._num_hex = _State.HEX, 4
            elif character in _ESCAPED:
                self._state = _State.STRING
            else:
                return Mark.BAD
        elif character == "\\":
            self._state = _State.ESCAPE
        elif character == '"':
            return self._end_string()
        else:  # a control character
            return Mark.BAD
        return None

    def _take_structure(self, character: str, state: _State) -> Mark | None:
        if state is _State.COLON:
            if character != ":":
                return Mark.BAD
            self._state = _State.VALUE
            return None
        if state is _State.NEXT:
            if character == self._closings[-1]:
                return self._close()
            if character != ",":
                return Mark.BAD
            self._state = _State.KEY if self._closings[-1] == "}" else _State.VALUE
            return None
        if state in (_State.KEY, _State.KEY_OR_END):
            if character == '"':
                self._state, self._is_key = _State.STRING, True
                return self._at_member(Mark.KEY_START)
            return self._close() if character == "}" and state is _State.KEY_OR_END else Mark.BAD
        if character == "]" and state is _State.VALUE_OR_END:
            return self._close()
        return self._begin_value(character)

    def _begin_value(self, character: str) -> Mark | None:
        mark = self._at_member(Mark.VALUE_START)
        if character in _CLOSING:
            if len(self._closings) == MAX_DEPTH or (not self._closings and character != "{"):
                return Mark.BAD
            self._closings.append(_CLOSING[character])
            self._state = _State.KEY_OR_END if character == "{" else _State.VALUE_OR_END
        elif not self._closings:
            return Mark.BAD
        elif character == '"':
            self._state, self._is_key = _State.STRING, False
        elif character in _LITERALS:
            self._state, self._rest = _State.LITERAL, _LITERALS[character]
        elif character in _NUMBER_STARTS:
            self._state, self._number = _State.NUMBER, _NUMBER_STARTS[character]
        else:
            return Mark.BAD
        return mark

    def _end_string(self) -> Mark | None:
        self._state = _State.COLON if self._is_key else _State.NEXT
        return self._at_member(Mark.KEY_END if self._is_key else Mark.VALUE_END)

    def _close(self) -> Mark | None:
        self._closings.pop()
        self._state = _State.NEXT  # after END nothing is read
        return self._at_member(Mark.VALUE_END) if self._closings else Mark.END

    def _at_member(self, mark: Mark) -> Mark | None:
        return mark if len(self._closings) == 1 else None
