"""Parsed output as content blocks: text, thoughts and whole calls, in the order of the answer. Between the parsers and `answers.py`.

Clients repair what they get of a call's input and may run it, so a call is held until it is whole. One that breaks off is text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, ContentDelta, MessageDelta, ReasoningDelta

_CHAT_PREFIX = "call_"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A whole call. `arguments` is a JSON object as the model wrote it."""

    call_id: str
    name: str
    arguments: str


Piece = ContentDelta | ReasoningDelta | ToolUse


class Pieces:
    """Puts the calls of one answer together. How the output was cut changes how text is cut, and nothing else."""

    def __init__(self) -> None:
        self._start: CallStart | None = None  # of the call that is held
        self._arguments: list[str] = []
        self._num_calls = 0  # that are out

    def add(self, deltas: Iterable[MessageDelta], num_calls: int) -> list[Piece]:
        """What is certain with `deltas`. `num_calls`: calls that the parser counts as whole after them."""
        pieces: list[Piece] = []
        for delta in deltas:
            if isinstance(delta, CallArguments):
                self._arguments.append(delta.text)
            elif isinstance(delta, CallBroken):
                self._start = None
                self._arguments.clear()
            else:
                self._release(pieces)  # what follows a call that did not break says that it is whole
                if isinstance(delta, CallStart):
                    self._start = delta
                else:
                    pieces.append(delta)
        if self._num_calls < num_calls:
            self._release(pieces)
        return pieces

    def _release(self, pieces: list[Piece]) -> None:
        if self._start is None:
            return
        call_id = "toolu_" + self._start.call_id.removeprefix(_CHAT_PREFIX)
        pieces.append(ToolUse(call_id, self._start.name, "".join(self._arguments)))
        self._start = None
        self._arguments.clear()
        self._num_calls += 1
