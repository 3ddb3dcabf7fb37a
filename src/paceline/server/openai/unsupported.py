"""Options of OpenAI's and vLLM's APIs that this version lacks, with the values that leave the answer as it is.

A request that asks for one is refused: silence would give another answer than the one asked for. Names that are neither here nor
in `requests.py` have no effect on the answer (`user`, `metadata`, `store`, `service_tier` ...) and are ignored.
"""

from collections.abc import Iterable

import msgspec

from paceline.errors import BadInputError

# name -> values that ask for nothing; None is always one
NEUTRAL: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "echo": (False,),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "conversation_id": (),
}
_NEUTRAL_IN_COMPLETION: dict[str, tuple[object, ...]] = {  # chat has them
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "continue_final_message": (False,),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
}
_NEUTRAL_IN_RESPONSE: dict[str, tuple[object, ...]] = {
    **NEUTRAL,
    "messages": (),  # chat's names of what has another one here
    "prompt": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "logprobs": (False,),
    "response_format": (),
    "n": (1,),
    "prompt_logprobs": (),
    "continue_final_message": (False,),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "return_token_ids": (False,),
    "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
}
_NEUTRAL_IN_MESSAGE: dict[str, tuple[object, ...]] = {"function_call": (), "audio": ()}
_NULL = msgspec.Raw(b"null")  # a field that the body lacks holds this very object, which nearly all do
_MAX_NEUTRAL_BYTES = 100  # no value that asks for nothing is longer; others are not even parsed


def absent_fields(names: Iterable[str]) -> list[tuple[str, type, msgspec.Raw]]:
    """Fields of a struct that keeps what a body has under `names`, unparsed; null where it has nothing."""
    return [(name, msgspec.Raw, _NULL) for name in names]


# Only the fields named above, and these unparsed: whatever else a body holds is skipped.
_Body = msgspec.defstruct("_Body", absent_fields(NEUTRAL))
_Message = msgspec.defstruct("_Message", absent_fields(_NEUTRAL_IN_MESSAGE))
_CompletionBody = msgspec.defstruct("_CompletionBody", absent_fields(_NEUTRAL_IN_COMPLETION), bases=(_Body,))
_ResponseBody = msgspec.defstruct("_ResponseBody", absent_fields(_NEUTRAL_IN_RESPONSE))
_ChatBody = msgspec.defstruct("_ChatBody", [("messages", list[_Message])], bases=(_Body,), kw_only=True)  # pyright: ignore[reportInvalidTypeForm]


def refuse_unsupported(body: bytes, is_chat: bool) -> None:
    """Raise BadInputError for the first field of a valid body that would change the answer if this version had it."""
    fields = msgspec.structs.asdict(msgspec.json.decode(body, type=_ChatBody if is_chat else _CompletionBody))
    messages = fields.pop("messages", ())
    for name, value in fields.items():
        if value is not _NULL:
            refuse_unless_neutral(name, value, NEUTRAL[name] if name in NEUTRAL else _NEUTRAL_IN_COMPLETION[name])
    for index, message in enumerate(messages):
        for name, value in msgspec.structs.asdict(message).items():
            if value is not _NULL:
                refuse_unless_neutral(f"messages.{index}.{name}", value, _NEUTRAL_IN_MESSAGE[name])


def refuse_unsupported_in_response(body: bytes) -> None:
    """The same for the body of a response, whose fields have other names than chat's."""
    for name, value in msgspec.structs.asdict(msgspec.json.decode(body, type=_ResponseBody)).items():
        refuse_unless_neutral(name, value, _NEUTRAL_IN_RESPONSE[name])


def refuse_unless_neutral(path: str, raw: msgspec.Raw, neutral: tuple[object, ...]) -> None:
    """Raise BadInputError for a field that holds none of the values that ask for nothing."""
    if raw is _NULL:
        return
    encoded = bytes(raw)
    if encoded != b"null" and (len(encoded) > _MAX_NEUTRAL_BYTES or not any(_is_same(_value(encoded), other) for other in neutral)):
        raise BadInputError(f"{path} is not supported by this version; leave it out", param=path, code="unsupported_parameter")


def _value(encoded: bytes) -> object:
    try:
        return msgspec.json.decode(encoded)
    except msgspec.DecodeError:  # a number out of range or broken text, which skipping over it did not notice
        return encoded  # equals no value of JSON


def _is_same(value: object, neutral: object) -> bool:
    """Equality that tells True from 1, but not 0 from 0.0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
