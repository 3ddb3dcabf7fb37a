"""Request bodies as pydantic models: strict types and ranges that need no knowledge of the model. Everything else is `chat.py`'s.

Fields that are not named here are kept aside: `unsupported.py` refuses those that would change the answer and ignores the rest.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
_MAX_INT = 2**63 - 1


def _check_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]


def _kind_of_stop(value: object) -> str:
    return "strings" if isinstance(value, list) else "string"


def _kind_of_prompt(value: object) -> str:
    """Which of the four forms of a prompt this is, told by its first element: errors then name the element at fault."""
    if not isinstance(value, list):
        return "string"
    first: object = value[0] if value else ""  # pyright: ignore[reportUnknownVariableType]
    if isinstance(first, list):
        return "token-id lists"
    return "strings" if isinstance(first, str) else "token ids"


def _kind_of_content(value: object) -> str:
    return "parts" if isinstance(value, list) else "string"


UNION_TAGS = frozenset({"string", "strings", "token ids", "token-id lists", "parts"})  # appear in pydantic's error locations

Stop = Annotated[
    Annotated[StopString, Tag("string")] | Annotated[StopStrings, Tag("strings")],
    Discriminator(_kind_of_stop),
]
Prompt = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[list[Text], Tag("strings")]
    | Annotated[list[TokenId], Tag("token ids")]
    | Annotated[list[list[TokenId]], Tag("token-id lists")],
    Discriminator(_kind_of_prompt),
]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints share. `None` is the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Text | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=_MAX_INT)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_MAX_INT)] = None  # 0 and -1: off
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1)] = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_draft_length: Annotated[int | None, Field(ge=0, le=_MAX_INT)] = None  # 0: no speculation for this request

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def unknown_fields(self) -> dict[str, object]:
        """Fields of the body that this model does not name, unparsed."""
        return self.model_extra or {}


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt


class TextPart(BaseModel):
    """One part of a message; only text is understood."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[TextPart], Tag("parts")],
    Discriminator(_kind_of_content),
]


class Message(BaseModel):
    """One turn. Tool calls and tool results are refused: their text would be missing from the prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=_MAX_INT)] = None  # wins over max_tokens, its old name
