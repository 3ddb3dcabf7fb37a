"""Structured output in a request body: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`.

Types and limits; what they say as one grammar's source. Compiling is `server/grammar.py`'s.
"""

import json
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.errors import BadInputError
from paceline.server.grammar import GrammarSource

MAX_SOURCE_BYTES = 64 * 1024
MAX_TEXTS = 1024
MAX_TEXT_CHARS = 1024

_NULL = b"null"
_ANY_OBJECT = '{"type": "object"}'

SourceText = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_BYTES)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]], Meta(min_length=1, max_length=MAX_TEXTS)]
SchemaName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


def _absent() -> Raw:
    return Raw(_NULL)


Schema = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "boolean", "string", "null"]})]  # or its text


class TextFormat(Struct, frozen=True, gc=False, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, gc=False, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Struct, frozen=True, gc=False):
    """A schema as OpenAI wraps it. The answer keeps to it whether or not it is `strict`; a strict one has no keyword unheeded."""

    name: SchemaName
    description: str | None = None
    schema: Schema = msgspec.field(default_factory=_absent)
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, gc=False, tag_field="type", tag="json_schema"):
    """A JSON text that fits a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """vLLM's. `json` is a schema or its text."""

    json: Schema = msgspec.field(default_factory=_absent)
    regex: SourceText | None = None
    choice: Choices | None = None
    grammar: SourceText | None = None
    json_object: bool | None = None


class Structured(Struct, frozen=True, kw_only=True):
    """The fields of a body; at most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = msgspec.field(default_factory=_absent)
    guided_regex: SourceText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SourceText | None = None

    def grammar_source(self) -> GrammarSource | None:
        """The grammar of the answer; None: any text. Raises BadInputError if two are asked for."""
        found = [source for source in (*self._openai(), *self._vllm(), *self._older()) if source is not None]
        if len(found) > 1:
            raise BadInputError(
                f"{found[1].param}: {found[0].param} asks for another structure of the same answer; send one of them", param=found[1].param
            )
        return found[0] if found else None

    def _openai(self) -> tuple[GrammarSource | None, ...]:
        match self.response_format:
            case JsonObjectFormat():
                return (GrammarSource("json_schema", _ANY_OBJECT, "response_format"),)
            case JsonSchemaFormat(named):
                path = "response_format.json_schema.schema"
                source = _schema(named.schema, path, is_lenient=not named.strict)
                return (source or GrammarSource("json_schema", _ANY_OBJECT, path),)
            case _:
                return ()

    def _vllm(self) -> tuple[GrammarSource | None, ...]:
        asked, path = self.structured_outputs, "structured_outputs"
        if asked is None:
            return ()
        return (
            _schema(asked.json, f"{path}.json", is_lenient=True),
            _regex(asked.regex, f"{path}.regex"),
            _choice(asked.choice, f"{path}.choice"),
            None if asked.grammar is None else GrammarSource("lark", asked.grammar, f"{path}.grammar"),
            GrammarSource("json_schema", _ANY_OBJECT, f"{path}.json_object") if asked.json_object else None,
        )

    def _older(self) -> tuple[GrammarSource | None, ...]:
        return (
            _schema(self.guided_json, "guided_json", is_lenient=True),
            _regex(self.guided_regex, "guided_regex"),
            _choice(self.guided_choice, "guided_choice"),
            None if self.guided_grammar is None else GrammarSource("lark", self.guided_grammar, "guided_grammar"),
        )


def _schema(raw: Raw, path: str, is_lenient: bool) -> GrammarSource | None:
    encoded = bytes(raw)
    if encoded == _NULL:
        return None
    if len(encoded) > MAX_SOURCE_BYTES:
        raise BadInputError(f"{path}: the schema has {len(encoded):,} bytes, limit {MAX_SOURCE_BYTES:,}; shorten it", param=path)
    try:
        text = msgspec.json.decode(encoded, type=str) if encoded.startswith(b'"') else encoded.decode()
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadInputError(f"{path}: is not valid JSON: {error}", param=path) from None
    return GrammarSource("json_schema", text, path, is_lenient)


def _regex(pattern: str | None, path: str) -> GrammarSource | None:
    """A slash ends a pattern in Lark, and so does a line break."""
    if pattern is None:
        return None
    escaped: list[str] = []
    is_escaped = False
    for char in pattern:
        escaped.append({"/": "\\/", "\n": "\\n"}.get(char, char) if not is_escaped else {"\n": "n"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return GrammarSource("lark", f"start: /{''.join(escaped)}/\n", path)


def _choice(texts: list[str] | None, path: str) -> GrammarSource | None:
    if texts is None:
        return None
    return GrammarSource("lark", f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}\n", path)
