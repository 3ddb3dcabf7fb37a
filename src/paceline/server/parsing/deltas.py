"""What parsers of model output say: the parts of an assistant's message, in the order of the text. No API's shape; `openai/messages.py`
and its siblings give them one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its name is known, and its arguments have begun. `index` counts the calls of the answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as the model wrote them.

    Together they are a JSON object exactly if the whole call is well-formed: the last brace is held until that is certain.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun is none: its JSON is bad or ends too early. All of its text follows as content.

    A stream cannot take back what it sent; but what it sent of the arguments is no JSON, so that nobody can run the call.
    """

    index: int


MessageDelta = ContentDelta | ReasoningDelta | CallStart | CallArguments | CallBroken


class OutputParser(Protocol):
    """Reads one answer's text in pieces. How it is cut changes how the parts are cut, never what they add up to."""

    @property
    def num_calls(self) -> int:
        """Calls that are whole so far."""
        ...

    def feed(self, text: str) -> Sequence[MessageDelta]:
        """What `text` adds. Holds back only what may still be a tag, white space beside one, or the head of a call."""
        ...

    def finish(self) -> Sequence[MessageDelta]:
        """What was held back, once nothing can follow. Called once, whatever ended the answer."""
        ...


class PlainParser:
    """All text is content: for models without tools and reasoning, and requests that want none."""

    @property
    def num_calls(self) -> int:
        return 0

    def feed(self, text: str) -> Sequence[MessageDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> Sequence[MessageDelta]:
        return []
