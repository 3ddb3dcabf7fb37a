"""Parsed output in OpenAI's shapes: the `message` of a whole answer and the `delta` of a stream chunk, as fields for msgspec to encode."""

from collections.abc import Iterable

from paceline.core.request import FinishReason
from paceline.server.parsing.deltas import CallBroken, CallStart, ContentDelta, MessageDelta, ReasoningDelta

_TOOL_CALLS = "tool_calls"


class _Call:
    """What is known of a call, or what a chunk says of it."""

    __slots__ = ("_arguments", "_start")

    def __init__(self) -> None:
        self._start: CallStart | None = None
        self._arguments: list[str] = []

    def begin(self, start: CallStart) -> None:
        self._start = start

    def add_arguments(self, text: str) -> None:
        self._arguments.append(text)

    def fields(self) -> dict[str, object]:
        arguments = "".join(self._arguments)
        if self._start is None:
            return {"function": {"arguments": arguments}}
        return {"id": self._start.call_id, "type": "function", "function": {"name": self._start.name, "arguments": arguments}}


class Message:
    """One answer's message, put together while its parts come."""

    __slots__ = ("_calls", "_content", "_reasoning")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def add(self, deltas: Iterable[MessageDelta]) -> None:
        """A broken call leaves nothing behind: its text is in the content."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif isinstance(delta, CallBroken):
                del self._calls[delta.index]
            elif isinstance(delta, CallStart):
                self._calls.setdefault(delta.index, _Call()).begin(delta)
            else:
                self._calls.setdefault(delta.index, _Call()).add_arguments(delta.text)

    def fields(self) -> dict[str, object]:
        """The `message` of a choice. `content` is null if there are only calls."""
        content = "".join(self._content)
        fields: dict[str, object] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            fields["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            fields[_TOOL_CALLS] = [call.fields() for call in self._calls.values()]
        return fields

    def delta_fields(self) -> dict[str, object]:
        """What was added, as the `delta` of a choice; empty if that is nothing."""
        fields: dict[str, object] = {}
        if self._reasoning:
            fields["reasoning_content"] = "".join(self._reasoning)
        if self._content:
            fields["content"] = "".join(self._content)
        if self._calls:
            fields[_TOOL_CALLS] = [{"index": index, **call.fields()} for index, call in self._calls.items()]
        return fields


def delta_fields(deltas: Iterable[MessageDelta]) -> dict[str, object]:
    """The `delta` of one chunk for all of `deltas`; empty if a client sees none of them.

    What a stream has sent of a call that then breaks stays at the client, as arguments that are no JSON.
    """
    chunk = Message()
    chunk.add(delta for delta in deltas if not isinstance(delta, CallBroken))
    return chunk.delta_fields()


def finish_reason(reason: FinishReason, num_calls: int) -> str:
    """OpenAI's name for the end of an answer with that many whole calls. One that was cut stays `length`: a call may be missing."""
    return _TOOL_CALLS if reason is FinishReason.STOP and num_calls else str(reason)
