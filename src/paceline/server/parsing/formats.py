"""Which parser reads a model's output: chosen from its chat template, because that is where a model's formats are written down.

The server asks once per model for the format and once per answer for a parser.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.server.parsing import reasoning
from paceline.server.parsing.call import Calls
from paceline.server.parsing.deltas import OutputParser, PlainParser
from paceline.server.parsing.hermes import HermesParser
from paceline.server.parsing.llama_json import LlamaJsonParser

TOOL_PARSERS: dict[str, Callable[[Calls], OutputParser]] = {"hermes": HermesParser, "llama_json": LlamaJsonParser}

_HERMES = ("<tool_call>", "arguments")
_NOT_HERMES = ("<function=", "<arg_key>")  # the same tag around XML: Qwen3-Coder, GLM 4.5
_LLAMA_JSON = ("<|python_tag|>", '"parameters": dictionary')


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes what is not plain text. `tools` is a name in TOOL_PARSERS; None: it calls no tools, or in no format known here."""

    tools: str | None
    has_reasoning: bool

    def parser(self, prompt: str, tool_names: Collection[str] = ()) -> OutputParser:
        """A parser for the answer to `prompt`, the rendered text. Without names of tools, what looks like a call is content."""
        answer: OutputParser = PlainParser()
        if self.tools is not None and tool_names:
            answer = TOOL_PARSERS[self.tools](Calls(tool_names))
        if not self.has_reasoning:
            return answer
        return reasoning.ReasoningParser(answer, is_open=prompt.rstrip().endswith(reasoning.OPEN_TAG))


def output_format(template: str) -> OutputFormat:
    """The format that a chat template's text shows or asks for."""
    tools = None
    if all(sign in template for sign in _HERMES) and not any(sign in template for sign in _NOT_HERMES):
        tools = "hermes"
    elif any(sign in template for sign in _LLAMA_JSON):
        tools = "llama_json"
    return OutputFormat(tools, has_reasoning=reasoning.OPEN_TAG in template or reasoning.CLOSE_TAG in template)
