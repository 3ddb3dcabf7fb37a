"""Bodies of Anthropic's routes: the types and ranges of their fields. What becomes of them is `conversion.py`'s.

Options that Anthropic's API lacks are those of the chat route under their names there. Fields that change nothing here (`metadata`,
`cache_control`, `service_tier` ...) are skipped.
"""

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.errors import BadInputError
from paceline.server.anthropic.unsupported import refuse_unsupported
from paceline.server.openai.requests import MAX_MESSAGES, GenerationRequest, OutputTokens, Prediction, StopStrings, read_body
from paceline.server.openai.tool_requests import MAX_PARTS, MAX_TOOLS, CallId, TextPart

T = TypeVar("T", bound="PromptRequest")

_ABSENT = b"null"
_PREFIX = "Anthropic"
_REFUSED = ("n", "stop", "prompt_logprobs", "stream_options", "response_format")  # chat's options that `unsupported.py` refuses
_FOREIGN_BLOCK = re.compile(r"(\S+\.content\.\d+)\.type: Invalid (?:enum )?value '(.*?)'.*", re.DOTALL)

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$(?!\n)")]
AnyObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


def _absent() -> Raw:
    return Raw(_ABSENT)


class TextBlock(Struct, frozen=True, gc=False, tag_field="type", tag="text"):
    """Text of any role."""

    text: str


TextBlocks = Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]  # where no other block can stand


class ToolResultBlock(Struct, frozen=True, gc=False, tag_field="type", tag="tool_result"):
    """What a call returned, in a message of the user."""

    tool_use_id: CallId
    content: str | TextBlocks | None = None
    is_error: bool | None = None


class ToolUseBlock(Struct, frozen=True, gc=False, tag_field="type", tag="tool_use"):
    """A call that the model made. Names are not checked: it may have called what does not exist."""

    id: CallId
    name: Annotated[str, Meta(min_length=1)]
    input: AnyObject


class ThinkingBlock(Struct, frozen=True, gc=False, tag_field="type", tag="thinking"):
    """What the model thought. Its `signature` is skipped: the template decides whether thoughts of earlier turns are shown."""

    thinking: str


class RedactedThinkingBlock(Struct, frozen=True, gc=False, tag_field="type", tag="redacted_thinking"):
    """Thoughts that only their maker can read."""


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserMessage(Struct, frozen=True, gc=False, tag_field="role", tag="user"):
    """What the user says, and what the calls of the turn before returned."""

    content: str | Annotated[list[UserBlock], Meta(max_length=MAX_PARTS)]


class AssistantMessage(Struct, frozen=True, gc=False, tag_field="role", tag="assistant"):
    """What the model said, thought and called; as the last message the beginning of the answer."""

    content: str | Annotated[list[AssistantBlock], Meta(max_length=MAX_PARTS)]


class SystemMessage(Struct, frozen=True, gc=False, tag_field="role", tag="system"):
    """What the operator says in the middle of a conversation."""

    content: str | TextBlocks


Message = UserMessage | AssistantMessage | SystemMessage


class Tool(Struct, frozen=True, gc=False):
    """A tool of the client's own. Others have a `type` that names them."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: AnyObject = msgspec.field(default_factory=_absent)
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"]})] = msgspec.field(default_factory=_absent)

    @property
    def has_schema(self) -> bool:
        return bytes(self.input_schema) != _ABSENT

    @property
    def has_examples(self) -> bool:
        return bytes(self.input_examples) not in (_ABSENT, b"[]")


class AutoChoice(Struct, frozen=True, gc=False, tag_field="type", tag="auto"):
    """The model decides whether to call."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, gc=False, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, frozen=True, gc=False, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, frozen=True, gc=False, tag_field="type", tag="none"):
    """The model does not see the tools."""


ToolChoice = AutoChoice | AnyChoice | NamedChoice | NoChoice


class Thinking(Struct, frozen=True, gc=False):
    """How much the model shall think."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_models_choice(self) -> bool:
        """Whether it asks for what a model does by itself."""
        return self.type == "adaptive" and self.display in (None, "summarized")


class JsonFormat(Struct, frozen=True, gc=False):
    """A JSON text that fits a schema."""

    type: Literal["json_schema"]
    schema: AnyObject


class OutputConfig(Struct, frozen=True, gc=False):
    """What the answer looks like. `effort` is there to be refused: no model here can be told how hard to think."""

    format: JsonFormat | None = None
    effort: str | None = None


class PromptRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def has_one_call(self) -> bool:
        """Whether the answer may have one call at most."""
        return not isinstance(self.tool_choice, NoChoice | None) and bool(self.tool_choice.disable_parallel_tool_use)


class MessagesRequest(PromptRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: OutputTokens  # pyright: ignore[reportGeneralTypeIssues] - all fields are given by name, so one may be required again
    stop_sequences: StopStrings | None = None
    prediction: Prediction | None = None


def read_messages(body: bytes) -> MessagesRequest:
    """The body of `POST /v1/messages`. Raises BadInputError naming the first field at fault."""
    request = _read(body, MessagesRequest)
    if (request.min_tokens or 0) > request.max_tokens:
        raise BadInputError(f"min_tokens is {request.min_tokens:,}, more than max_tokens, {request.max_tokens:,}", param="min_tokens")
    return request


def read_prompt(body: bytes) -> PromptRequest:
    """The body of `POST /v1/messages/count_tokens`. Raises BadInputError naming the first field at fault."""
    return _read(body, PromptRequest)


def schemas(ref_template: str) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """JSON schemas of the two bodies, the one of messages first, and what they refer to by name."""
    ours = ref_template.format(name=_PREFIX + "{name}")  # some types have namesakes in OpenAI's API
    (messages, prompt), named = msgspec.json.schema_components((MessagesRequest, PromptRequest), ref_template=ours)
    for kind in (MessagesRequest, PromptRequest):
        for name in _REFUSED:
            del named[kind.__name__]["properties"][name]
    del named[PromptRequest.__name__]["properties"]["stream"]  # it is skipped there
    return messages, prompt, {_PREFIX + name: schema for name, schema in named.items()}


def _read(body: bytes, kind: type[T]) -> T:
    try:
        request = read_body(body, kind)
    except BadInputError as error:
        raise _with_remedy(error) from None
    refuse_unsupported(body)
    if request.output_config is not None:
        _check_output(request.output_config)
    return request


def _check_output(config: OutputConfig) -> None:
    if config.effort is not None:
        raise BadInputError(
            "output_config.effort: no model here can be told how hard to think; leave it out",
            param="output_config.effort",
            code="unsupported_parameter",
        )
    if config.format is not None and not bytes(config.format.schema).startswith(b"{"):
        raise BadInputError("output_config.format.schema: must be a JSON object", param="output_config.format.schema")


def _with_remedy(error: BadInputError) -> BadInputError:
    """What to do about a block that is not understood."""
    found = _FOREIGN_BLOCK.fullmatch(str(error))
    if found is None:
        return error
    return BadInputError(
        f"{found[1]}: a block of the type {found[2][:100]!r} cannot stand here. A message of the user holds text and tool_result blocks, a "
        "tool_result text, one of the assistant text, thinking and tool_use; put what images and documents say into text, and "
        "run tools in the client",
        param=found[1],
        code="unsupported_parameter",
    )
