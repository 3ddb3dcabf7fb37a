"""Parsed output as items of a response, and the events that tell a stream of them. `reply.py` feeds it step by step.

The items are the same whether the answer streams or not, and however it is cut into steps.
"""

from collections.abc import Sequence
from typing import cast

import msgspec

from paceline.server.detokenize import ReportedToken, Vocabulary
from paceline.server.openai.logprobs import chat_logprobs
from paceline.server.parsing.deltas import CallArguments, CallStart, ContentDelta, MessageDelta, ReasoningDelta
from paceline.server.responses.events import Events
from paceline.server.responses.items import new_id

_encode = msgspec.json.encode
_TEXT_DELTA = b"response.output_text.delta"
_REASONING_DELTA = b"response.reasoning_text.delta"
_ARGUMENTS_DELTA = b"response.function_call_arguments.delta"


class _OpenItem:
    """The item that is being written. `index` is its number among all items of the stream."""

    __slots__ = ("id", "index", "logprobs", "place", "start", "texts", "type")

    def __init__(self, item_type: str, index: int, start: CallStart | None = None) -> None:
        self.type = item_type
        self.id = new_id(item_type)
        self.index = index
        self.start = start  # of a call
        self.texts: list[str] = []
        self.logprobs: list[object] = []
        place: dict[str, object] = {"item_id": self.id, "output_index": index}
        self.place = place if start is not None else place | {"content_index": 0}

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> dict[str, object]:
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def fields(self, status: str, is_empty: bool = False) -> dict[str, object]:
        """The item; `is_empty`: as it is when it is opened."""
        fields: dict[str, object] = {"id": self.id, "type": self.type, "status": status}
        if self.start is not None:
            return fields | {"call_id": self.start.call_id, "name": self.start.name, "arguments": "" if is_empty else self.text}
        content = [] if is_empty else [self.part(self.text)]
        return fields | ({"summary": [], "content": content} if self.type == "reasoning" else {"role": "assistant", "content": content})


class Output:
    """The items of one answer."""

    def __init__(self, vocabulary: Vocabulary, events: Events) -> None:
        self._vocabulary = vocabulary
        self._events = events
        self._open: _OpenItem | None = None
        self._place = b""  # the open item's, encoded
        self._num_opened = 0
        self._pending: list[ReportedToken] = []  # tokens of which it is not known yet what they are part of
        self.items: list[dict[str, object]] = []  # those that are finished

    def add(self, parts: Sequence[MessageDelta], tokens: Sequence[ReportedToken] = ()) -> None:
        """What one step said. `tokens`: its tokens, if their log-probabilities were asked for.

        They belong to the message if the step said any of it, and to what comes next if the step said nothing yet.
        """
        if tokens:
            self._pending += tokens
        for part in parts:
            if isinstance(part, ContentDelta):
                self._add_text(part.text)
            elif isinstance(part, ReasoningDelta):
                self._add_reasoning(part.text)
            elif isinstance(part, CallStart):
                self._begin("function_call", part)
            elif isinstance(part, CallArguments):
                self._add_arguments(part.text)
            else:
                self._break_call()
        if parts and self._pending:
            self._pending.clear()

    def end(self, is_whole: bool) -> None:
        """Nothing follows. An answer without any item gets a message without text, because clients look for one."""
        if is_whole and not self.items and self._open is None:
            self._begin("message")
        if self._open is not None and self._open.type == "message":
            self._open.logprobs += self._take_logprobs()  # of tokens without text, such as the last one
        self._finish("completed" if is_whole else "incomplete")

    def _add_text(self, text: str) -> None:
        item = self._open
        if item is None or item.type != "message":
            item = self._begin("message")
        item.texts.append(text)
        logprobs = b"[]"
        if self._pending:
            entries = self._take_logprobs()
            item.logprobs += entries
            logprobs = _encode(entries)
        self._events.say_delta(_TEXT_DELTA, self._place, text, logprobs)

    def _add_reasoning(self, text: str) -> None:
        item = self._open
        if item is None or item.type != "reasoning":
            item = self._begin("reasoning")
        item.texts.append(text)
        self._events.say_delta(_REASONING_DELTA, self._place, text)

    def _add_arguments(self, text: str) -> None:
        assert self._open is not None, "arguments follow the start of their call"
        self._open.texts.append(text)
        self._events.say_delta(_ARGUMENTS_DELTA, self._place, text)

    def _break_call(self) -> None:
        """It is no call: the answer does not hold it, and a stream, which cannot take it back, says that it is incomplete."""
        item, self._open = self._open, None
        assert item is not None, "it follows its call"
        self._events.say("response.output_item.done", {"output_index": item.index, "item": item.fields("incomplete")})

    def _begin(self, item_type: str, start: CallStart | None = None) -> _OpenItem:
        self._finish("completed")
        item = self._open = _OpenItem(item_type, self._num_opened, start)
        self._num_opened += 1
        if self._events.is_silent:
            return item
        self._place = _encode(item.place)[1:-1]
        self._events.say("response.output_item.added", {"output_index": item.index, "item": item.fields("in_progress", is_empty=True)})
        if start is None:
            self._events.say("response.content_part.added", {**item.place, "part": item.part("")})
        return item

    def _finish(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        fields = item.fields(status)
        self.items.append(fields)
        if self._events.is_silent:
            return
        if item.type == "message":
            self._events.say("response.output_text.done", {**item.place, "text": item.text, "logprobs": item.logprobs})
        elif item.type == "reasoning":
            self._events.say("response.reasoning_text.done", {**item.place, "text": item.text})
        else:
            self._events.say("response.function_call_arguments.done", {**item.place, "name": fields["name"], "arguments": item.text})
        if item.start is None:
            self._events.say("response.content_part.done", {**item.place, "part": item.part(item.text)})
        self._events.say("response.output_item.done", {"output_index": item.index, "item": fields})

    def _take_logprobs(self) -> list[object]:
        if not self._pending:
            return []
        entries = cast(list[object], chat_logprobs(self._vocabulary, self._pending)["content"])
        self._pending.clear()
        return entries
