"""`truncation: auto`: a conversation that is too long for the model loses its oldest turns, as few as make it fit."""

import msgspec

from paceline.errors import BadInputError
from paceline.server.chat import Job, Preparation
from paceline.server.openai.requests import ChatCompletionRequest
from paceline.server.openai.tool_requests import DeveloperMessage, SystemMessage, UserMessage

_TOO_LONG = "context_length_exceeded"
_PARAMS = ("messages", "max_completion_tokens")  # of a prediction that is too long nothing can be taken away


async def fitting_job(preparation: Preparation, chat: ChatCompletionRequest) -> Job:
    """The job of a chat without its oldest turns, if it does not fit with them. Raises BadInputError if the last turn alone does not.

    The system's and developer's messages at the beginning stay. What is left begins with a user's message, so that no result is left
    without its call.
    """
    too_long: BadInputError
    try:
        return await preparation.chat(chat)
    except BadInputError as error:
        if error.code != _TOO_LONG or error.param not in _PARAMS:
            raise
        too_long = error
    num_kept = 0
    while num_kept < len(chat.messages) and isinstance(chat.messages[num_kept], SystemMessage | DeveloperMessage):
        num_kept += 1
    starts = [index for index in range(num_kept + 1, len(chat.messages)) if isinstance(chat.messages[index], UserMessage)]
    job: Job | None = None
    low, high = 0, len(starts)
    while low < high:  # the more is left out, the shorter it is
        middle = (low + high) // 2
        messages = [*chat.messages[:num_kept], *chat.messages[starts[middle] :]]
        try:
            job, high = await preparation.chat(msgspec.structs.replace(chat, messages=messages)), middle
        except BadInputError as error:
            if error.code != _TOO_LONG:
                raise
            low = middle + 1
    if job is None:
        raise too_long
    return job
