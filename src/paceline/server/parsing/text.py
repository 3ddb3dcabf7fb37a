"""Tags in text that comes in pieces, and the white space beside them. Used by the parsers of this folder."""

import re
from collections.abc import Callable

from paceline.server.parsing.deltas import MessageDelta
from paceline.server.parsing.json_scanner import SPACE

_SPACE_RUN = re.compile(f"[{SPACE}]*")


class TagFinder:
    """Finds the next occurrence of a tag; holds back only text that may be its beginning.

    A tag's first character must occur in it only once: then a match that fails cannot hide the beginning of another.
    """

    __slots__ = ("_num_matched", "_tag")

    def __init__(self, tag: str) -> None:
        assert tag.count(tag[0]) == 1
        self._tag = tag
        self._num_matched = 0  # leading characters of the tag that are held

    def find(self, text: str, start: int) -> tuple[str, int, bool]:
        """From `start`: the text that is certain not to be of the tag, where to read on, and whether the tag was found there."""
        tag, failed = self._tag, ""
        if self._num_matched:
            rest = tag[self._num_matched :]
            part = text[start : start + len(rest)]
            if part == rest:
                self._num_matched = 0
                return "", start + len(rest), True
            if rest.startswith(part):
                self._num_matched += len(part)
                return "", len(text), False
            failed = self.flush()
        found = text.find(tag, start)
        if found >= 0:
            return failed + text[start:found], found + len(tag), True
        opening = text.rfind(tag[0], max(start, len(text) - len(tag) + 1))
        if opening < 0 or not tag.startswith(text[opening:]):
            return failed + text[start:], len(text), False
        self._num_matched = len(text) - opening
        return failed + text[start:opening], len(text), False

    def resume(self, text: str) -> str:
        """Take up text that another search gave back, itself the beginning of some tag; returns it if it is not that of this one."""
        if not self._tag.startswith(text):
            return text
        self._num_matched = len(text)
        return ""

    def flush(self) -> str:
        """The held text, once it is known not to become the tag."""
        held = self._tag[: self._num_matched]
        self._num_matched = 0
        return held


class ExpectedTag:
    """Whether the text goes on with a tag, white space before it allowed. Used once."""

    __slots__ = ("_num_matched", "_spaces", "_tag")

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._spaces: list[str] = []
        self._num_matched = 0

    def take(self, text: str, start: int) -> tuple[int, bool | None]:
        """Where to read on, and whether the tag is there (None: more text must tell). `spaces` and `part` are what was taken."""
        if not self._num_matched:
            end = end_of_space(text, start)
            self._spaces.append(text[start:end])
            start = end
        rest = self._tag[self._num_matched :]
        part = text[start : start + len(rest)]
        if not rest.startswith(part):
            return start, False
        self._num_matched += len(part)
        return start + len(part), True if part == rest else None

    @property
    def taken(self) -> str:
        return self.spaces + self.part

    @property
    def spaces(self) -> str:
        return "".join(self._spaces)

    @property
    def part(self) -> str:
        """The characters of the tag that were there."""
        return self._tag[: self._num_matched]


class TextChannel:
    """The texts of one kind, content or reasoning, with white space held until the text beside it is known."""

    __slots__ = ("_has_text", "_is_trimmed", "_make_delta", "_spaces")

    def __init__(self, make_delta: Callable[[str], MessageDelta], is_trimmed: bool) -> None:
        """`is_trimmed`: white space before the first text and after the last one is left out."""
        self._make_delta = make_delta
        self._is_trimmed = is_trimmed
        self._has_text = False
        self._spaces: list[str] = []

    def push(self, text: str, deltas: list[MessageDelta]) -> None:
        """Add `text` to the channel, and what is certain of it to `deltas`."""
        body = text.rstrip(SPACE)
        if not body:
            if text:
                self._spaces.append(text)
            return
        spaces, self._spaces = "".join(self._spaces), [text[len(body) :]]
        if self._is_trimmed and not self._has_text:
            spaces, body = "", body.lstrip(SPACE)
        self._has_text = True
        deltas.append(self._make_delta(spaces + body))

    def trim(self) -> None:
        """Something else stands here: leave out the white space before it, and that after it unless between texts."""
        self._spaces.clear()
        self._is_trimmed = True

    def end(self, deltas: list[MessageDelta]) -> None:
        """Nothing follows."""
        spaces = "".join(self._spaces)
        if spaces and not self._is_trimmed:
            deltas.append(self._make_delta(spaces))


def end_of_space(text: str, start: int) -> int:
    """Where the run of white space that begins at `start` ends."""
    run = _SPACE_RUN.match(text, start)
    assert run is not None
    return run.end()
