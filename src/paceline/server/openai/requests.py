"""Request bodies: the types and ranges of their fields, as far as they need no knowledge of the model. Everything else is `chat.py`'s.

msgspec checks while it reads, stops at the first fault and builds nothing that no field asks for. So a body of the largest size, good
or bad, holds the event loop for a tenth of a second or two; a JSON parser in front of a validator takes seconds and gigabytes.
"""

import re
from functools import cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.config import MAX_INT, AnswerConfig, settings
from paceline.errors import BadInputError
from paceline.server.openai.structured import Structured
from paceline.server.openai.tool_requests import ChatMessage, Content, ToolChoice, Tools
from paceline.server.openai.unsupported import refuse_unsupported

T = TypeVar("T")

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PROMPTS = 64
MAX_PROMPT_TOKEN_IDS = 1 << 20  # of all prompts of a request together
MAX_MESSAGES = 4096
MAX_CHOICES = 64  # of all prompts of a request together
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_SALT_CHARS = 256


def _range_of(name: str) -> Meta:
    """The range that `config.py` gives to a field of AnswerConfig."""
    limits = next(item.metadata for item, _ in settings(AnswerConfig) if item.name == name)
    if limits["above"] is not None:
        return Meta(gt=limits["above"], le=limits["high"])
    return Meta(ge=limits["low"], le=limits["high"])


TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
BiasedTokenId = Annotated[str, Meta(pattern="^[0-9]{1,18}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
OutputTokens = Annotated[int, _range_of("max_tokens")]
Temperature = Annotated[float, _range_of("temperature")]


class StreamOptions(Struct, frozen=True, gc=False):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Structured, frozen=True, kw_only=True):
    """What both endpoints share. `None` is the same as leaving a field out."""

    model: str | None = None
    max_tokens: OutputTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, _range_of("top_p")] | None = None
    top_k: Annotated[int, _range_of("top_k")] | None = None
    min_p: Annotated[float, _range_of("min_p")] | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, _range_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range_of("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _range_of("repetition_penalty")] | None = None
    logit_bias: Annotated[dict[BiasedTokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, _range_of("min_tokens")] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_draft_length: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None  # 0: no speculation for this request
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None  # cached prefixes are shared within one salt

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        return {int(token_id): value for token_id, value in (self.logit_bias or {}).items()}


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKENS_SCHEMA,
        {"type": "array", "items": _TOKENS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`", re.DOTALL)
_LIST_START = re.compile(rb"\s*\[\s*(.)", re.DOTALL)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    logprobs: NumLogprobs | bool | None = None  # false, which chat clients send, is the same as leaving it out
    return_token_ids: bool | None = None  # the tokens beside the text, the prompt's too
    prompt: Annotated[Raw, Meta(extra_json_schema=_PROMPT_SCHEMA)]  # one of four forms, told apart by `prompts`

    def prompts(self) -> tuple[list[str], list[list[int]]]:
        """The texts of the prompt, or else its token ids; one of the two lists is empty. Raises BadInputError.

        The first element tells which of the forms it is, so that an error names the element at fault.
        """
        body = bytes(self.prompt)
        start = _LIST_START.match(body)
        if start is None:
            return [_decode(body, str, "prompt")], []
        if start[1] == b'"':
            texts = _decode(body, list[str], "prompt")
            _check_num_prompts(len(texts))
            return texts, []
        _check_token_ids(body)
        if start[1] == b"[":
            return [], _decode(body, list[list[TokenId]], "prompt")
        return [], [_decode(body, list[TokenId], "prompt")]


class Prediction(Struct, frozen=True, gc=False):
    """What the client expects of the answer; it only makes the answer faster."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OutputTokens | None = None  # wins over max_tokens, its old name
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    continue_final_message: bool | None = None  # the last message is the beginning of the answer
    parallel_tool_calls: bool | None = None  # false: nothing is said behind the first call
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None  # likeliest tokens beside each chosen one
    return_token_ids: bool | None = None  # the tokens beside the text, the prompt's too


def read_completion(body: bytes) -> CompletionRequest:
    """The body of `POST /v1/completions`. Raises BadInputError naming the first field at fault."""
    request = _decode(body, CompletionRequest)
    refuse_unsupported(body, is_chat=False)
    return request


def read_chat_completion(body: bytes) -> ChatCompletionRequest:
    """The body of `POST /v1/chat/completions`. Raises BadInputError naming the first field at fault."""
    request = _decode(body, ChatCompletionRequest)
    refuse_unsupported(body, is_chat=True)
    return request


def read_body(body: bytes, kind: type[T]) -> T:
    """The body of another route. Raises BadInputError naming the first field at fault."""
    return _decode(body, kind)


@cache  # the same for every server of a process
def schemas(ref_template: str) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """JSON schemas for the description of the interface: the two bodies', and what they refer to by name."""
    (completion, chat), named = msgspec.json.schema_components((CompletionRequest, ChatCompletionRequest), ref_template=ref_template)
    return completion, chat, named


def _check_token_ids(body: bytes) -> None:
    """Refuse too many before any is built: where there is no text, every bracket and comma is structure, and can be counted."""
    _check_num_prompts(body.count(b"[") - 1)
    num_token_ids = body.count(b",") + 1
    if num_token_ids > MAX_PROMPT_TOKEN_IDS:
        raise BadInputError(f"the request has {num_token_ids:,} token ids, limit {MAX_PROMPT_TOKEN_IDS:,}; send fewer", param="prompt")


def _check_num_prompts(num_prompts: int) -> None:
    if num_prompts > MAX_PROMPTS:
        raise BadInputError(f"the request has {num_prompts:,} prompts, limit {MAX_PROMPTS}; send several requests", param="prompt")


def _decode(body: bytes, kind: type[T], field: str = "") -> T:
    """`body` as `kind`; `field` is where it stands in the request. Raises BadInputError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), field) from None
    except msgspec.DecodeError as error:
        raise BadInputError(f"the body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise BadInputError("the body is nested too deeply") from None


def _invalid(message: str, field: str) -> BadInputError:
    """msgspec's words, with the path in them as OpenAI's `param`: "Expected `int` - at `$.stop[1]`" is about `stop.1`."""
    found = _PLACE.fullmatch(message)
    reason, path = (message, "") if found is None else (found[1], found[2].replace("[...]", ""))
    param = (field + re.sub(r"\[(\d+)\]", r".\1", path)).removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        param, reason = f"{param}.{missing[1]}".removeprefix("."), "the field is missing"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", reason):
        param, reason = f"{param}.{unknown[1]}".removeprefix("."), "there is no such field here; leave it out"
    if reason.startswith(("Invalid enum value", "Invalid value")):
        reason += "; other values are not supported by this version"
    if not param:
        return BadInputError(f"the body must be a JSON object: {reason}")
    return BadInputError(f"{param}: {reason}", param=param)
