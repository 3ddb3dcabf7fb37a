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

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
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
        except TemplateError as error:
            raise BadInputError(f"the model's chat template is not a valid Jinja template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant speaks. Raises BadInputError if the template refuses the messages."""
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(messages=list(messages), add_generation_prompt=True, tools=None, **self._special_tokens):
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
    """The template of a model folder, or None if it has none: `chat_template.jinja`, else `tokenizer_config.json`."""
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _template_of(config.get("chat_template"))
    if source is None:
        return None
    tokens = {**_read_json(folder / "special_tokens_map.json"), **config}
    return ChatTemplate(source, {name: text for name in _SPECIAL_TOKENS if (text := _token_text(tokens.get(name))) is not None})


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


def _template_of(value: object) -> str | None:
    """A template, or the one named default of several."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in cast(list[object], value):
            if isinstance(entry, dict):
                named = cast(dict[str, object], entry)
                if named.get("name") == "default" and isinstance(named.get("template"), str):
                    return str(named["template"])
    return None


def _token_text(value: object) -> str | None:
    """A special token as written in the configuration: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInputError(f"{path} is not valid JSON: {error}") from error
    return cast(dict[str, object], content) if isinstance(content, dict) else {}
