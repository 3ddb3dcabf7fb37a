"""The model folder's chat template: messages to prompt text, in Jinja's sandbox. Called by `chat.py` in a worker thread.

The environment is the one that Hugging Face templates are written for. A template is the model's code, not ours: it gets plain
data, cannot change it, and any error in it is the request's.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import BadInputError
from paceline.models.folder import read_chat_format

MAX_OUTPUT_CHARS = 16 * 1024 * 1024  # no request of at most 10 MB needs more; a template may loop


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - how jinja declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadInputError if `source` is not a Jinja template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        environment.filters["tojson"] = _tojson
        names = cast(dict[str, object], environment.globals)
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except Exception as error:  # beside TemplateError: what a source too deep or too large for the compiler raises
            raise BadInputError(f"the model's chat template is not a valid Jinja template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The prompt up to where the assistant speaks. Raises BadInputError if the template refuses the messages.

        `tools`: OpenAI's objects; a template that knows none leaves them out silently, so ask `output_format` first.
        """
        offered = list(tools) or None  # templates test for either
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(messages=list(messages), add_generation_prompt=True, tools=offered, **self._special_tokens):
                num_chars += len(part)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise BadInputError(f"the chat template wrote more than {MAX_OUTPUT_CHARS:,} characters for these messages")
                parts.append(part)
        except _RefusedByTemplateError as error:
            raise BadInputError(f"the model's chat template refuses these messages: {error}", param="messages") from None
        except BadInputError:
            raise
        except Exception as error:  # whatever a template may raise: it is code from the model folder
            raise BadInputError("the model's chat template cannot render these messages", param="messages") from error
        return "".join(parts)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, or None if it has none. Raises BadInputError for one that cannot be used."""
    chat_format = read_chat_format(folder)
    return None if chat_format is None else ChatTemplate(chat_format.template, chat_format.special_tokens)


class _RefusedByTemplateError(TemplateError):
    """The template called `raise_exception`: its message is meant for the user."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
