"""`POST /tokenize` and `POST /detokenize` on the wire, in vLLM's shapes. The work is `chat.py`'s."""

from collections.abc import Sequence
from typing import Annotated, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from paceline.errors import BadInputError
from paceline.server.openai.requests import (
    MAX_PROMPT_TOKEN_IDS,
    ChatCompletionRequest,
    TokenId,
    read_body,
    read_chat_completion,
)
from paceline.server.openai.tool_requests import ChatMessage

_MESSAGE_SCHEMA = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in get_args(ChatMessage)]}
_MESSAGES_SCHEMA = {"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1}
_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_PROMPT_TOKEN_IDS}


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text or a chat. `None` is the same as leaving a field out."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Raw, Meta(extra_json_schema=_MESSAGES_SCHEMA)] | UnsetType = UNSET
    add_special_tokens: bool | None = None  # for a text; a chat template writes its own
    return_token_strs: bool | None = None

    @property
    def is_chat(self) -> bool:
        return self.messages is not UNSET and bytes(self.messages) != b"null"


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Any tokens of the model."""

    tokens: Annotated[Raw, Meta(extra_json_schema=_TOKENS_SCHEMA)]
    model: str | None = None

    def token_ids(self) -> list[int]:
        """The tokens. Raises BadInputError, before any is built if there are too many."""
        num_tokens = bytes(self.tokens).count(b",") + 1
        if num_tokens > MAX_PROMPT_TOKEN_IDS:
            raise BadInputError(f"the request has {num_tokens:,} tokens, limit {MAX_PROMPT_TOKEN_IDS:,}; send fewer", param="tokens")
        return read_body(b'{"tokens":' + bytes(self.tokens) + b"}", _Tokens).tokens


class _Tokens(Struct, frozen=True):
    tokens: list[TokenId]


def read_tokenize(body: bytes) -> tuple[TokenizeRequest, ChatCompletionRequest | None]:
    """The body of `POST /tokenize`, and the chat in it if it holds one. Raises BadInputError naming the first field at fault."""
    request = read_body(body, TokenizeRequest)
    if (request.prompt is None) != request.is_chat:
        raise BadInputError("give either prompt, a text, or messages, a chat", param="prompt")
    return request, read_chat_completion(body) if request.is_chat else None


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of `POST /detokenize`. Raises BadInputError naming the first field at fault."""
    return read_body(body, DetokenizeRequest)


def tokenize_answer(token_ids: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None) -> bytes:
    """`token_strs`: None if they were not asked for."""
    fields = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": token_strs}
    return msgspec.json.encode(fields)


def detokenize_answer(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})
