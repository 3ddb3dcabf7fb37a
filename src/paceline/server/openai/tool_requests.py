"""Tools in a chat request: which are offered, whether one must be called, and the turns in which some were.

Types and limits are msgspec's, as in `requests.py`; what types cannot say is checked here, where the turns and tools become what chat
templates expect. Templates see arguments as objects, clients send them as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.errors import BadInputError

MAX_TOOLS = 128  # OpenAI's
MAX_CALLS = 128  # of one message
MAX_PARTS = 4096
MAX_SCHEMA_BYTES = 64 * 1024  # of one tool
MAX_ID_CHARS = 256

_NULL = b"null"

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$(?!\n)")]
CallId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]


def _absent() -> Raw:
    return Raw(_NULL)


class Function(Struct, frozen=True, gc=False):
    """A function that the model may call. `parameters` is a JSON schema, read when it is needed."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] = msgspec.field(default_factory=_absent)
    strict: bool | None = None


class Tool(Struct, frozen=True, gc=False):
    """OpenAI knows other types; only functions are understood."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, frozen=True, gc=False):
    """Which function must be called."""

    name: str


class NamedChoice(Struct, frozen=True, gc=False):
    """Asks for a call of one function."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class TextPart(Struct, frozen=True, gc=False):
    """One part of a message; only text is understood."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class SystemMessage(Struct, frozen=True, gc=False, tag_field="role", tag="system"):
    """What the operator says."""

    content: Content
    name: str | None = None


class DeveloperMessage(Struct, frozen=True, gc=False, tag_field="role", tag="developer"):
    """OpenAI's newer name of a system message. Templates know the old one."""

    content: Content
    name: str | None = None


class UserMessage(Struct, frozen=True, gc=False, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class CalledFunction(Struct, frozen=True, gc=False):
    """Names are not checked here: a model may have called what does not exist, and be told so in the next turn."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class ToolCall(Struct, frozen=True, gc=False):
    """A call that the model made."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct, frozen=True, gc=False, tag_field="role", tag="assistant"):
    """What the model said, called, or both."""

    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    name: str | None = None


class ToolMessage(Struct, frozen=True, gc=False, tag_field="role", tag="tool"):
    """What a call returned."""

    content: Content
    tool_call_id: CallId


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools that an answer may call. `must_call`: it has to call one of them."""

    tools: tuple[dict[str, object], ...] = ()  # as templates expect them
    names: tuple[str, ...] = ()  # those that may be called; with a named choice fewer than `tools`
    must_call: bool = False
    is_single: bool = False  # where it must call: exactly one


def tool_offer(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> ToolOffer:
    """What a request offers to the model. Raises BadInputError.

    The choice `none` takes the tools out of the prompt, so that the model does not see what it may not call.
    """
    names = [tool.function.name for tool in tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _error(f"tools.{index}.function.name", f"there are two tools named {name!r}; give each its own name")
    described = tuple(_template_tool(index, tool.function) for index, tool in enumerate(tools or ()))
    if isinstance(choice, NamedChoice):
        if choice.function.name not in names:
            raise _error("tool_choice", f"names the function {choice.function.name[:100]!r}, which is not among the {len(names)} in tools")
        return ToolOffer(described, (choice.function.name,), must_call=True, is_single=True)
    if choice == "required" and not names:
        raise _error("tool_choice", "asks for a call, but there are no tools; send some in tools")
    return ToolOffer() if choice == "none" else ToolOffer(described, tuple(names), must_call=choice == "required")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The turns as templates expect them. Raises BadInputError for one that cannot stand where it does."""
    called: dict[str, str] = {}  # id -> name of the function
    return [_template_message(f"messages.{index}", message, called) for index, message in enumerate(messages)]


def num_chars(message: ChatMessage) -> int:
    """Characters that a message brings into the prompt, to refuse too many before the template is run."""
    total = len(text_of(message.content))
    if isinstance(message, AssistantMessage):
        total += len(message.reasoning_content or "")
        total += sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
    return total


def text_of(content: Content | None) -> str:
    """The text of a message, its parts one per line."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _template_message(path: str, message: ChatMessage, called: dict[str, str]) -> dict[str, object]:
    fields: dict[str, object] = {"role": _role(message), "content": text_of(message.content)}
    if isinstance(message, ToolMessage):
        if message.tool_call_id not in called:
            raise _error(
                f"{path}.tool_call_id",
                f"no earlier message has a call with the id {message.tool_call_id[:100]!r}; "
                "send the assistant's message with its tool_calls, too",
            )
        return fields | {"tool_call_id": message.tool_call_id, "name": called[message.tool_call_id]}
    if message.name is not None:
        fields["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.content is None and not message.tool_calls:
            raise _error(f"{path}.content", "an assistant's message needs content or tool_calls")
        if message.reasoning_content is not None:
            fields["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(f"{path}.tool_calls.{index}", call) for index, call in enumerate(message.tool_calls)]
            called.update((call.id, call.function.name) for call in message.tool_calls)
    return fields


def _role(message: ChatMessage) -> str:
    if isinstance(message, ToolMessage):
        return "tool"
    if isinstance(message, AssistantMessage):
        return "assistant"
    return "user" if isinstance(message, UserMessage) else "system"


def _template_call(path: str, call: ToolCall) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if call.function.arguments.strip():  # clients send none for a function without parameters
        arguments = _object(call.function.arguments, f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _template_tool(index: int, function: Function) -> dict[str, object]:
    """In the order of fields that models have seen in training."""
    fields: dict[str, object] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    schema, path = bytes(function.parameters), f"tools.{index}.function.parameters"
    if len(schema) > MAX_SCHEMA_BYTES:
        raise _error(path, f"the schema has {len(schema):,} bytes, limit {MAX_SCHEMA_BYTES:,}; shorten it")
    if schema != _NULL:
        fields["parameters"] = _object(schema, path)
    return {"type": "function", "function": fields}


def _object(source: str | bytes, path: str) -> dict[str, object]:
    try:
        value = cast(object, msgspec.json.decode(source))
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _error(path, f"is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise _error(path, "is nested too deeply") from None
    if not isinstance(value, dict):
        raise _error(path, "must be a JSON object")
    return cast(dict[str, object], value)


def _error(path: str, reason: str) -> BadInputError:
    return BadInputError(f"{path}: {reason}", param=path)
