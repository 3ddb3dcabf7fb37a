"""Items: what a conversation of `/v1/responses` is made of. Read from requests and from the store, and turned into chat messages.

An item is one struct for all types, because a message may leave its type out; which fields a type needs is checked here.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from paceline.errors import BadInputError
from paceline.server.openai.requests import MAX_MESSAGES
from paceline.server.openai.tool_requests import (
    MAX_CALLS,
    MAX_ID_CHARS,
    MAX_PARTS,
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    DeveloperMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

_NUM_ID_BYTES = 16
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ItemText(Struct, frozen=True, gc=False):
    """A piece of text; there are no images and files in this version."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


Text = str | Annotated[list[ItemText], Meta(max_length=MAX_PARTS)]
ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]


class Item(Struct, frozen=True, gc=False):
    """A message, a call of a function, its result, or what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None  # None: a message
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | None = None
    call_id: ItemId | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None
    arguments: str | None = None
    output: Text | None = None


Items = Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]


def new_id(item_type: str) -> str:
    """An id as OpenAI's clients expect it."""
    return f"{_ID_PREFIXES[item_type]}_{secrets.token_hex(_NUM_ID_BYTES)}"


def check_items(items: Sequence[Item]) -> None:
    """Raise BadInputError for an item of a request that lacks what its type needs."""
    for index, item in enumerate(items):
        if item.type == "function_call":
            needed: dict[str, object] = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        elif item.type == "function_call_output":
            needed = {"call_id": item.call_id, "output": item.output}
        elif item.type == "reasoning":
            needed = {}
        else:
            needed = {"role": item.role, "content": item.content}
        for name, value in needed.items():
            if value is None:
                raise _error(f"input.{index}.{name}", "the field is missing")
        if item.type == "function_call":
            _check_arguments(f"input.{index}.arguments", item.arguments or "")


def chat_messages(earlier: Sequence[Item], new: Sequence[Item]) -> list[ChatMessage]:
    """Checked items as chat messages. Raises BadInputError for a result whose call is in none of the items before.

    `earlier` are those of the conversation so far. What the model said and called in one turn becomes one message, with what it thought
    before; thoughts that nothing follows are left out.
    """
    turns = _Turns()
    for item in earlier:
        turns.add(item, "input")
    for index, item in enumerate(new):
        turns.add(item, f"input.{index}")
    turns.end_turn()
    return turns.messages


def stored_item(item: Item) -> dict[str, object]:
    """An item of a checked request as it is stored and listed: with an id, text as parts."""
    item_type = item.type or "message"
    fields: dict[str, object] = {"id": item.id or new_id(item_type), "type": item_type, "status": "completed"}
    if item_type == "function_call":
        return fields | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if item_type == "function_call_output":
        return fields | {"call_id": item.call_id, "output": _text(item.output)}
    if item_type == "reasoning":
        del fields["status"]
        return fields | {"summary": [], "content": [{"type": "reasoning_text", "text": _text(item.content)}]}
    if item.role == "assistant":
        part: dict[str, object] = {"type": "output_text", "text": _text(item.content), "annotations": [], "logprobs": []}
    else:
        part = {"type": "input_text", "text": _text(item.content)}
    return fields | {"role": item.role, "content": [part]}


def encode_items(items: Sequence[dict[str, object]]) -> bytes:
    """Stored items as one JSON list."""
    return msgspec.json.encode(items)


def decode_items(turns: Sequence[bytes]) -> list[Item]:
    """The items of stored JSON lists."""
    return [item for turn in turns for item in msgspec.json.decode(turn, type=list[Item])]


class _Turns:
    """Chat messages while items are added."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._called: set[str] = set()
        self._thought: str | None = None  # of the assistant's turn that is open
        self._said: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, item: Item, path: str) -> None:
        """`path`: where the item stands in the request."""
        if item.type == "reasoning":
            if self._said is not None or self._calls:
                self.end_turn()
            self._thought = _text(item.content) or self._thought
        elif item.type == "function_call":
            self._add_call(item, path)
        elif item.type == "function_call_output":
            self.end_turn()
            self._add_result(item, path)
        elif item.role == "assistant":
            if self._said is not None or self._calls:
                self.end_turn()
            self._said = _text(item.content)
        else:
            self.end_turn()
            message = {"user": UserMessage, "system": SystemMessage, "developer": DeveloperMessage}[item.role or "user"]
            self.messages.append(message(content=_text(item.content)))

    def end_turn(self) -> None:
        """What follows is not the assistant's, or is another message of it."""
        if self._said is not None or self._calls:
            message = AssistantMessage(content=self._said, tool_calls=self._calls or None, reasoning_content=self._thought)
            self.messages.append(message)
        self._thought, self._said, self._calls = None, None, []

    def _add_call(self, item: Item, path: str) -> None:
        assert item.call_id is not None
        assert item.name is not None
        if len(self._calls) == MAX_CALLS:
            raise _error(path, f"more than {MAX_CALLS} calls in a row; send fewer")
        self._called.add(item.call_id)
        self._calls.append(ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments or "")))

    def _add_result(self, item: Item, path: str) -> None:
        assert item.call_id is not None
        if item.call_id not in self._called:
            raise _error(
                f"{path}.call_id",
                f"no earlier item is a function_call with the call_id {item.call_id[:100]!r}; send it, too, or name its response "
                "in previous_response_id",
            )
        self.messages.append(ToolMessage(content=_text(item.output), tool_call_id=item.call_id))


def _text(text: Text | None) -> str:
    if text is None:
        return ""
    return text if isinstance(text, str) else "\n".join(part.text for part in text)


def _check_arguments(path: str, arguments: str) -> None:
    if not arguments.strip():  # clients send none for a function without parameters
        return
    try:
        is_object = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _error(path, f"is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise _error(path, "is nested too deeply") from None
    if not is_object:
        raise _error(path, "must be a JSON object")


def _error(path: str, reason: str) -> BadInputError:
    return BadInputError(f"{path}: {reason}", param=path)
