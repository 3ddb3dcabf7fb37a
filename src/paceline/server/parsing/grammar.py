"""Grammars of what the parsers here read, in llguidance's language: calls that have to be made, and the thought before an answer.

`server/grammar.py` puts an answer's own grammar in between and has the whole checked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.server.parsing import hermes, reasoning
from paceline.server.parsing.formats import OutputFormat

ANSWER = "answer"  # the name under which the answer's own grammar goes
CALLS = "calls"

_MAX_CALLS = 16  # a small model that has to call goes on calling
_GAP = r"/[ \t\r\n]{0,4}/"


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that may be called, and the JSON schema of its arguments as text."""

    name: str
    schema: str


@dataclass(frozen=True, slots=True)
class Tags:
    """How a model's tags are written in a grammar: those that are tokens by their name, others as text."""

    is_token: Callable[[str], bool]

    def of(self, tag: str) -> str:
        return tag if self.is_token(tag) else _text(tag)


def top_rules(output_format: OutputFormat, prompt: str, tags: Tags, alternatives: Sequence[str]) -> str:
    """The start of an answer to `prompt`: what the model thinks, if it does, then one of the named grammars."""
    answer = " | ".join(f"@{name}" for name in alternatives)
    if not output_format.has_reasoning:
        return f"start: {answer}\n"
    close_tag = reasoning.CLOSE_TAG
    if tags.is_token(close_tag):
        rules = f"thought: thinking {close_tag} {_GAP}\nthinking: /(?s:.*)/\n"
    else:
        rules = f"thought: thinking {_GAP}\nthinking[suffix={_text(close_tag)}]: /(?s:.*)/\n"
    is_open = prompt.rstrip().endswith(reasoning.OPEN_TAG)
    start = "thought" if is_open else f"({tags.of(reasoning.OPEN_TAG)} thought)?"
    return f"start: {start} ({answer})\n{rules}"


def call_rules(output_format: OutputFormat, functions: Sequence[CallableFunction], tags: Tags, is_single: bool) -> str:
    """Calls of `functions`, at least one; `is_single`: and at most one. The fixed text is the one that models were trained on."""
    if output_format.tools == "hermes":
        open_tag, close_tag, between, field = f'{tags.of(hermes.OPEN_TAG)} "\\n"', f'"\\n" {tags.of(hermes.CLOSE_TAG)}', "\n", "arguments"
    else:
        open_tag, close_tag, between, field = "", "", "; ", "parameters"
    rules = ["start: call" + ("" if is_single else f" ({_text(between)} call){{0,{_MAX_CALLS - 1}}}")]
    rules.append(f"call: {open_tag} ({' | '.join(f'call{index}' for index in range(len(functions)))}) {close_tag}")
    for index, function in enumerate(functions):
        head = f'{{"name": {_text(function.name)}, "{field}": '
        rules.append(f'call{index}: {_text(head)} arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {function.schema}")
    return "\n".join(rules) + "\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def composed(parts: Mapping[str, Mapping[str, object]], top: str) -> str:
    """The text of a grammar that starts with the rules `top` and has `parts` under their names."""
    return json.dumps({"grammars": [{"lark_grammar": top}, *({"name": name, **part} for name, part in parts.items())]}, ensure_ascii=False)
