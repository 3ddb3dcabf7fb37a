"""Fields that change an answer and that Anthropic's routes lack: refused by name, as `openai/unsupported.py` does for the others."""

import msgspec

from paceline.errors import BadInputError
from paceline.server.openai.unsupported import NEUTRAL, absent_fields, refuse_unless_neutral

# name -> values that ask for nothing; None is always one
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **NEUTRAL,
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "stream_options": ({},),
    "parallel_tool_calls": (True,),  # tool_choice says so there
    "continue_final_message": (),  # an assistant's message at the end always is
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
}
_OTHER_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "response_format": "output_config.format",
    "output_format": "output_config.format",
}

_Body = msgspec.defstruct("_Body", absent_fields({**_NEUTRAL, **_OTHER_NAMES}))


def refuse_unsupported(body: bytes) -> None:
    """Raise BadInputError for the first field of a valid body that would change the answer if these routes had it."""
    fields = msgspec.structs.asdict(msgspec.json.decode(body, type=_Body))
    for name, neutral in _NEUTRAL.items():
        refuse_unless_neutral(name, fields[name], neutral)
    for name, ours in _OTHER_NAMES.items():
        if bytes(fields[name]) != b"null":
            raise BadInputError(f"{name}: here its name is {ours}", param=name)
