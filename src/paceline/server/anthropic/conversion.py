"""Bodies of Anthropic's routes as chat requests: the same turns and tools in the other API's order. Called by `routes.py`.

Results of calls, which stand in messages of the user there, are messages of their own here; turns of one role in a row become one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from paceline.errors import BadInputError
from paceline.server.anthropic.requests import (
    AnyChoice,
    AssistantBlock,
    AssistantMessage,
    AutoChoice,
    MessagesRequest,
    NoChoice,
    PromptRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    UserMessage,
)
from paceline.server.openai import tool_requests as chat
from paceline.server.openai.requests import ChatCompletionRequest, GenerationRequest
from paceline.server.openai.structured import JsonSchemaFormat, NamedSchema

B = TypeVar("B")

_ERROR = "Error: "  # before the result of a call that failed: templates have no other way to say so


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A body as a chat request. `places`: where its fields stand in the body that was sent, as far as chat's checks may name them."""

    request: ChatCompletionRequest
    places: dict[str, str]

    def explained(self, error: BadInputError) -> BadInputError:
        """An error of the chat request, under the name that its field has in the body."""
        place = self.places.get(error.param or "")
        if error.param is None or place is None:
            return error
        return BadInputError(str(error).replace(error.param, place, 1), param=place, code=error.code)


class _Turns:
    """The chat's messages while they are made: those that are finished, and the parts of an open turn."""

    def __init__(self) -> None:
        self.messages: list[chat.ChatMessage] = []
        self.places: dict[str, str] = {}
        self._call_ids: set[str] = set()
        self._role: str | None = None  # of the open turn
        self._texts: list[chat.TextPart] = []
        self._thoughts: list[str] = []
        self._calls: list[chat.ToolCall] = []
        self._has_results = False

    def add_system(self, content: str | list[chat.TextPart]) -> None:
        self.close()
        self.messages.append(chat.SystemMessage(content))

    def add_user(self, blocks: Iterator[tuple[str, UserBlock]]) -> None:
        """Text and results in their order. Raises BadInputError for the result of a call that was not made."""
        self._open("user")
        for path, block in blocks:
            if isinstance(block, TextBlock):
                self._texts.append(_part(block))
                continue
            self._has_results = True
            self.close()
            self._role, self._has_results = "user", True
            self._add_result(path, block)

    def add_assistant(self, blocks: Iterator[tuple[str, AssistantBlock]]) -> None:
        """Templates write text before calls, so the order of the two is lost."""
        self._open("assistant")
        for path, block in blocks:
            if isinstance(block, TextBlock):
                self._texts.append(_part(block))
            elif isinstance(block, ThinkingBlock):
                self._thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                self._call_ids.add(block.id)
                self.places[f"messages.{len(self.messages)}.tool_calls.{len(self._calls)}.function.arguments"] = f"{path}.input"
                function = chat.CalledFunction(block.name, _text(f"{path}.input", block.input))
                self._calls.append(chat.ToolCall(block.id, function))

    def close(self) -> None:
        """End the open turn."""
        if self._role == "assistant":
            self.messages.append(chat.AssistantMessage(self._texts, self._calls or None, "\n".join(self._thoughts) or None))
        elif self._role == "user" and (self._texts or not self._has_results):
            self.messages.append(chat.UserMessage(self._texts))
        self._role, self._texts, self._thoughts, self._calls, self._has_results = None, [], [], [], False

    def _open(self, role: str) -> None:
        if self._role != role:
            self.close()
            self._role = role

    def _add_result(self, path: str, result: ToolResultBlock) -> None:
        if result.tool_use_id not in self._call_ids:
            raise _error(
                f"{path}.tool_use_id",
                f"no earlier message has a tool_use with the id {result.tool_use_id[:100]!r}; send the assistant's message with it, too",
            )
        text = chat.text_of(result.content)
        self.messages.append(chat.ToolMessage(_ERROR + text if result.is_error else text, result.tool_use_id))


def chat_form(body: PromptRequest) -> ChatForm:
    """A body as a chat request without `max_tokens`. Raises BadInputError for what chat cannot express."""
    turns = _Turns()
    if body.system is not None:
        turns.add_system(body.system)
    for index, message in enumerate(body.messages):
        path = f"messages.{index}"
        if isinstance(message, UserMessage):
            turns.add_user(_blocks(path, message.content))
        elif isinstance(message, AssistantMessage):
            turns.add_assistant(_blocks(path, message.content))
        else:
            turns.add_system(message.content)
    turns.close()
    turns.places["response_format.json_schema.schema"] = "output_config.format.schema"
    last = turns.messages[-1]
    is_continued = isinstance(last, chat.AssistantMessage)
    if is_continued and last.tool_calls:
        raise _error(f"messages.{len(body.messages) - 1}", "the last turn calls tools; send what they returned in a message of the user")
    for index in range(len(body.tools or ())):
        turns.places[f"tools.{index}.function.name"] = f"tools.{index}.name"
        turns.places[f"tools.{index}.function.parameters"] = f"tools.{index}.input_schema"
    request = ChatCompletionRequest(
        **_options(body),
        messages=turns.messages,
        tools=None if body.tools is None else [_tool(f"tools.{index}", tool) for index, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=False if body.has_one_call else None,
        continue_final_message=is_continued,
    )
    return ChatForm(request, turns.places)


def _options(body: PromptRequest) -> dict[str, Any]:
    """The fields that both kinds of body have: whatever chat learns there, these routes have, too."""
    options = {name: value for name, value in msgspec.structs.asdict(body).items() if name in GenerationRequest.__struct_fields__}
    options |= {"max_tokens": None, "stream_options": None}
    if isinstance(body, MessagesRequest):
        options |= {"stop": body.stop_sequences, "prediction": body.prediction}
    output_format = None if body.output_config is None else body.output_config.format
    if output_format is not None:  # strict: a schema with a keyword that nobody heeds is an error there, too
        options["response_format"] = JsonSchemaFormat(NamedSchema("answer", schema=output_format.schema, strict=True))
    return options


def _blocks(path: str, content: str | Sequence[B]) -> Iterator[tuple[str, B | TextBlock]]:
    """Each block with its place."""
    if isinstance(content, str):
        yield f"{path}.content", TextBlock(content)
    else:
        for index, block in enumerate(content):
            yield f"{path}.content.{index}", block


def _text(path: str, source: Raw) -> str:
    try:
        return bytes(source).decode()
    except UnicodeDecodeError:
        raise _error(path, "is not valid UTF-8") from None


def _part(block: TextBlock) -> chat.TextPart:
    return chat.TextPart("text", block.text)


def _tool(path: str, tool: Tool) -> chat.Tool:
    if tool.type not in (None, "custom"):
        raise _error(
            f"{path}.type",
            f"this server has no tools of its own, so none of the type {tool.type[:100]!r}; leave it out, or offer a tool of yours "
            "with an input_schema",
        )
    if not tool.has_schema:
        raise _error(f"{path}.input_schema", "the field is missing")
    if tool.has_examples:
        raise _error(f"{path}.input_examples", "chat templates show models no examples; put them into the description")
    if tool.defer_loading:
        raise _error(f"{path}.defer_loading", "nothing could load the tool later; leave this out, or leave the tool out")
    return chat.Tool("function", chat.Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: ToolChoice | None) -> chat.ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, AutoChoice):
        return "auto"
    if isinstance(choice, NoChoice):
        return "none"
    return "required" if isinstance(choice, AnyChoice) else chat.NamedChoice("function", chat.FunctionName(choice.name))


def _error(path: str, reason: str) -> BadInputError:
    return BadInputError(f"{path}: {reason}", param=path)
