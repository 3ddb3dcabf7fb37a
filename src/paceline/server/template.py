"""The model folder's chat template: messages to prompt text. Called by `chat.py`; the work is done by `template_child.py` in a process
of its own, because a template may loop for ever or ask for all memory, by its author's intent or for some user's messages.

Any error in it, and any limit it runs into, is the request's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.errors import BadInputError
from paceline.models.folder import read_chat_format
from paceline.server.template_child import MAX_OUTPUT_CHARS, InvalidTemplateError, OutputTooLongError, RefusedByTemplateError
from paceline.server.worker import Worker, WorkerError, WorkerLimits, WorkerTimeoutError

TIME_LIMIT_S = 2.0
"""For one rendering. The largest body that a request can have takes a fraction of a second; a template that needs longer does not end,
and while it runs nobody else's is rendered."""

_COMPILE_LIMIT_S = 30.0  # at the server's start, which competes with the loading of a model
_CHILD = "paceline.server.template_child"
# Memory: 10 MB of messages, decoded, put together and written again, with characters of four bytes.
_LIMITS = WorkerLimits(memory_bytes=512 << 20, max_answer_bytes=4 * MAX_OUTPUT_CHARS)


class ChatTemplate:
    """A template with the model's special tokens, and the process that renders it. From one event loop; `close` ends the process."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], worker: Worker | None = None) -> None:
        """`worker`: one that renders for other templates too, and that its owner closes."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._worker = worker or Worker(_CHILD, _LIMITS)
        self._owns_worker = worker is None

    async def start(self) -> None:
        """Start the process and compile the template, so that the first request does not wait. Raises BadInputError if it is invalid."""
        try:
            await self._worker.call(self._pack(None, ()), _COMPILE_LIMIT_S)
        except WorkerError as error:
            raise _invalid(error) from None

    async def close(self) -> None:
        if self._owns_worker:
            await self._worker.close()

    async def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The prompt up to where the assistant speaks. Raises BadInputError if the template refuses the messages.

        `tools`: OpenAI's objects; a template that knows none leaves them out silently, so ask `output_format` first.
        """
        return await self.render_packed(self.pack(messages, tools))

    def pack(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> bytes:
        """What `render_packed` takes. May run in another thread: many messages take some milliseconds. Raises BadInputError."""
        return self._pack(messages, tools)

    async def render_packed(self, request: bytes) -> str:
        """`render` of what `pack` made."""
        try:
            return (await self._worker.call(request, TIME_LIMIT_S)).decode()
        except WorkerError as error:
            raise _bad_input(error) from None

    def _pack(self, messages: Sequence[Mapping[str, object]] | None, tools: Sequence[Mapping[str, object]]) -> bytes:
        fields = {"source": self.source, "special_tokens": self._special_tokens, "messages": messages, "tools": tools}
        try:
            return msgspec.json.encode(fields)
        except RecursionError:
            raise BadInputError("the messages or tools are nested too deeply for the chat template", param="messages") from None


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, or None if it has none. Raises BadInputError for files that cannot be used."""
    chat_format = read_chat_format(folder)
    return None if chat_format is None else ChatTemplate(chat_format.template, chat_format.special_tokens)


def _invalid(error: WorkerError) -> BadInputError:
    return BadInputError(f"the model's chat template is not a valid Jinja template: {error}")


def _bad_input(error: WorkerError) -> BadInputError:
    """A template's own error messages tell of its inside, not of the request; only those meant for the user are passed on."""
    if isinstance(error, WorkerTimeoutError):
        message = f"the model's chat template took more than {TIME_LIMIT_S:g} s for these messages; send fewer or shorter ones"
    elif error.kind == InvalidTemplateError.__name__:
        return _invalid(error)
    elif error.kind == RefusedByTemplateError.__name__:
        message = f"the model's chat template refuses these messages: {error}"
    elif error.kind == OutputTooLongError.__name__:
        message = f"the model's chat template wrote more than {MAX_OUTPUT_CHARS:,} characters for these messages"
    elif error.kind == MemoryError.__name__:
        message = (
            f"the model's chat template needs more than {_LIMITS.memory_bytes >> 20} MB for these messages; send fewer or shorter ones"
        )
    elif error.kind == WorkerError.DIED:
        message = "the process that renders the model's chat template ended over these messages"
    else:
        message = "the model's chat template cannot render these messages"
    return BadInputError(message, param="messages")
