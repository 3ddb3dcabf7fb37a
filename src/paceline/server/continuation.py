"""Prompts that end inside the assistant's last message, so that the answer goes on with it. Called by `chat.py` around the template.

A template writes every message to its end. Where the text of the last one ends is found by a mark in it, which no other text can hold.
"""

import secrets
from collections.abc import Mapping, Sequence

from paceline.errors import BadInputError

_MARK_BYTES = 16


def mark_end(messages: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], str]:
    """The messages for the template with a mark where the last one ends, and the mark. Raises BadInputError for one that cannot go on."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise BadInputError(
            f"the last message, {_kind(last)}, is none that an answer can continue; "
            "end with text of the assistant, or leave continue_final_message out",
            param="continue_final_message",
        )
    mark = secrets.token_hex(_MARK_BYTES)
    return [*messages[:-1], last | {"content": f"{last['content']}{mark}"}], mark


def up_to_mark(text: str, mark: str) -> str:
    """A rendered prompt without the end of its last message. Raises BadInputError if the template did not write the text once."""
    before, *rest = text.split(mark)
    if len(rest) != 1:
        raise BadInputError(
            "the model's chat template does not write the assistant's last message as it is, so that no answer can continue it; "
            "end with a message of the user",
            param="messages",
        )
    return before


def _kind(message: Mapping[str, object]) -> str:
    return "with tool calls" if "tool_calls" in message else f"of the role {message['role']}"
