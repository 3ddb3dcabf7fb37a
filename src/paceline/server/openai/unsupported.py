"""Options of OpenAI's and vLLM's APIs that this version lacks, with the values that leave the answer as it is.

A request that asks for one is refused: silence would give another answer than the one asked for. Names that are neither here nor
in `requests.py` have no effect on the answer (`user`, `metadata`, `store`, `service_tier` ...) and are ignored.
"""

from collections.abc import Mapping

from paceline.errors import BadInputError

# name -> values that ask for nothing; None is always one
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "suffix": ("",),
    "echo": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "conversation_id": (),
}
_NEUTRAL_IN_MESSAGE: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "tool_call_id": (), "audio": ()}


def refuse_unsupported(fields: Mapping[str, object], where: str = "") -> None:
    """Raise BadInputError for the first of a body's unknown fields that would change the answer."""
    for name, value in fields.items():
        neutral = (_NEUTRAL_IN_MESSAGE if where else _NEUTRAL).get(name)
        if neutral is None or value is None or any(_is_same(value, other) for other in neutral):
            continue
        path = f"{where}.{name}" if where else name
        raise BadInputError(f"{path} is not supported by this version; leave it out", param=path, code="unsupported_parameter")


def _is_same(value: object, neutral: object) -> bool:
    """Equality that tells True from 1, but not 0 from 0.0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
