"""Compiles and renders chat templates in Jinja's sandbox. Run as a worker's child by `template.py`, never in the server's own process.

The environment is the one that Hugging Face templates are written for. A template is the model's code, not ours: it gets plain data
and cannot change it; how much time and memory it takes is for the worker to limit.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.server.worker_child import serve

MAX_OUTPUT_CHARS = 16 * 1024 * 1024  # no request of at most 10 MB needs more; a template may loop


class InvalidTemplateError(Exception):
    """The source is not a Jinja template, or one that the compiler cannot take."""


class RefusedByTemplateError(TemplateError):
    """The template called `raise_exception`: its message is meant for the user."""


class OutputTooLongError(Exception):
    """The template wrote more than MAX_OUTPUT_CHARS."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - how jinja declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def run(request: bytes) -> bytes:
    """The prompt for a request of `template.py` (an object of `source`, `special_tokens`, `messages`, `tools`) as UTF-8.

    Without `messages` the template is compiled only. Raises InvalidTemplateError, RefusedByTemplateError, OutputTooLongError, or
    whatever else the template raises.
    """
    fields = json.loads(request)
    template = compiled(fields["source"])
    if fields["messages"] is None:
        return b""
    return render(template, fields["messages"], fields["tools"], fields["special_tokens"]).encode()


@lru_cache(maxsize=1)  # a server has one template
def compiled(source: str) -> Template:
    """The template of a source. Raises InvalidTemplateError."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    names = cast(dict[str, object], environment.globals)
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # beside TemplateError: what a source too deep or too large for the compiler raises
        raise InvalidTemplateError(str(error)) from error


def render(
    template: Template,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    special_tokens: Mapping[str, str],
) -> str:
    """The prompt up to where the assistant speaks."""
    offered = list(tools) or None  # templates test for either
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(messages=list(messages), add_generation_prompt=True, tools=offered, **special_tokens):
        num_chars += len(part)
        if num_chars > MAX_OUTPUT_CHARS:
            raise OutputTooLongError
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplateError(str(message))


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


if __name__ == "__main__":
    serve(run)
