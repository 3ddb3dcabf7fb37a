"""Bodies of `POST /v1/responses`: types and ranges of their fields, and the chat request that each one stands for.

What the model makes of it (context, template, tools) is checked by the chat code, whose errors `in_our_terms` gives the names used here.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.errors import BadInputError, NotFoundError
from paceline.server.openai.requests import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    GenerationRequest,
    NumLogprobs,
    OutputTokens,
    Prediction,
    read_body,
)
from paceline.server.openai.structured import JsonObjectFormat, JsonSchemaFormat, NamedSchema, ResponseFormat, Schema, SchemaName
from paceline.server.openai.tool_requests import (
    MAX_ID_CHARS,
    MAX_TOOLS,
    ChatMessage,
    Function,
    FunctionName,
    NamedChoice,
    SystemMessage,
    Tool,
    ToolChoice,
    ToolName,
)
from paceline.server.openai.unsupported import refuse_unsupported_in_response
from paceline.server.responses.items import Item, Items, chat_messages, check_items

LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16  # OpenAI's limits of metadata
_MAX_KEY_CHARS = 64
_MAX_VALUE_CHARS = 512
_NULL = b"null"


def _absent() -> Raw:
    return Raw(_NULL)


class ResponseTool(Struct, frozen=True, gc=False):
    """A function that the model may call; this server has no tools of its own."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Schema = msgspec.field(default_factory=_absent)
    strict: bool | None = None


class ResponseToolChoice(Struct, frozen=True, gc=False):
    """Asks for a call of one function."""

    type: Literal["function"]
    name: str


class ResponseTextFormat(Struct, frozen=True, gc=False):
    """The form of the text. `name`, `schema` and `strict` go with a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema: Schema = msgspec.field(default_factory=_absent)
    strict: bool | None = None


class ResponseTextOptions(Struct, frozen=True, gc=False):
    """Nothing steers how much a model says, so that only the middle is there."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["medium"] | None = None


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # reasoning is given openly
    "file_search_call.results",  # these can never come without the tools they are about
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=_MAX_KEY_CHARS)], Annotated[str, Meta(max_length=_MAX_VALUE_CHARS)]],
    Meta(max_length=_MAX_METADATA),
]


class ResponseRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/responses`. Options that OpenAI gives to chat only hold here too, but for those that `unsupported.py` names."""

    input: str | Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    max_output_tokens: OutputTokens | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    include: Annotated[list[Included], Meta(max_length=64)] | None = None
    top_logprobs: NumLogprobs | None = None
    prediction: Prediction | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Meta(max_length=_MAX_VALUE_CHARS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None

    @property
    def items(self) -> list[Item]:
        """The input; a text is the user's message."""
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def read_response_request(body: bytes) -> ResponseRequest:
    """The body of `POST /v1/responses`. Raises BadInputError naming the first field at fault."""
    request = read_body(body, ResponseRequest)
    refuse_unsupported_in_response(body)
    check_items(request.items)
    if request.background and request.stream:
        raise _unsupported("background", "does not go with stream in this version; ask for the response by its id")
    if request.background and request.store is False:
        raise BadInputError("background: only goes with store, which keeps the response for you", param="background")
    if request.top_logprobs and not request.has_logprobs:
        raise BadInputError(f"top_logprobs: only goes with include: [{LOGPROBS!r}]", param="top_logprobs")
    return request


def chat_request(request: ResponseRequest, earlier: Sequence[Item]) -> ChatCompletionRequest:
    """The chat request that a response is the answer to. Raises BadInputError.

    `earlier`: the items of the conversation so far. Instructions stand before them, and are those of this request alone.
    """
    messages: list[ChatMessage] = [] if request.instructions is None else [SystemMessage(content=request.instructions)]
    messages += chat_messages(earlier, request.items)
    if not messages:
        raise BadInputError("input: holds nothing to answer; send a message", param="input")
    if len(messages) > MAX_MESSAGES:
        raise BadInputError(f"input: the conversation has {len(messages):,} messages, limit {MAX_MESSAGES:,}; begin another", param="input")
    return ChatCompletionRequest(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        bad_words=request.bad_words,
        min_tokens=request.min_tokens,
        max_draft_length=request.max_draft_length,
        cache_salt=request.cache_salt,
        stream=request.stream,
        tools=None if request.tools is None else [_chat_tool(tool) for tool in request.tools],
        tool_choice=_chat_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        prediction=request.prediction,
        response_format=response_format(request.text),
        structured_outputs=request.structured_outputs,
        guided_json=request.guided_json,
        guided_regex=request.guided_regex,
        guided_choice=request.guided_choice,
        guided_grammar=request.guided_grammar,
        logprobs=request.has_logprobs,
        top_logprobs=request.top_logprobs if request.has_logprobs else None,
    )


def response_format(text: ResponseTextOptions | None) -> ResponseFormat | None:
    """`text.format` as chat's `response_format`; None for plain text. Raises BadInputError."""
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type != "json_schema":
        if bytes(given.schema) != _NULL:
            param = "text.format.schema"
            raise BadInputError(
                f"{param}: a schema only goes with the type json_schema; send that type, or leave the schema out", param=param
            )
        return JsonObjectFormat() if given.type == "json_object" else None
    for name, is_missing in (("name", given.name is None), ("schema", bytes(given.schema) == _NULL)):
        if is_missing:
            raise BadInputError(f"text.format.{name}: the field is missing", param=f"text.format.{name}")
    return JsonSchemaFormat(NamedSchema(given.name or "", given.description, given.schema, given.strict))


_OUR_NAMES = (
    (re.compile(r"messages(\.\d+)*"), "input"),
    (re.compile(r"max_completion_tokens|max_tokens"), "max_output_tokens"),
    (re.compile(r"(tools\.\d+)\.function"), r"\1"),
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
)


def in_our_terms(error: BadInputError) -> BadInputError:
    """An error of the chat code, which names the fields of chat, with the names that this route has for them."""
    if error.param is None:
        return error
    for theirs, ours in _OUR_NAMES:
        found = theirs.match(error.param)
        if found is not None:
            param, name = theirs.sub(ours, error.param, 1), found[0]
            kind = NotFoundError if isinstance(error, NotFoundError) else BadInputError
            text = str(error)
            if name != "messages" or text.startswith("messages:"):  # elsewhere it is a word of the sentence
                text = text.replace(name, found.expand(ours))
            return kind(text, param=param, code=error.code)
    return error


def _chat_tool(tool: ResponseTool) -> Tool:
    return Tool(type="function", function=Function(tool.name, tool.description, tool.parameters, tool.strict))


def _chat_choice(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> ToolChoice | None:
    if isinstance(choice, ResponseToolChoice):
        return NamedChoice(type="function", function=FunctionName(choice.name))
    return choice


def _unsupported(param: str, reason: str) -> BadInputError:
    return BadInputError(f"{param}: {reason}", param=param, code="unsupported_parameter")
