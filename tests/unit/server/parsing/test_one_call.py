"""One call at most: what an answer says up to the end of its first whole call, however the text is cut."""

import pytest

from paceline.server.openai.messages import Message
from paceline.server.parsing.call import Calls
from paceline.server.parsing.deltas import CallStart
from paceline.server.parsing.hermes import HermesParser
from paceline.server.parsing.llama_json import LlamaJsonParser
from paceline.server.parsing.one_call import OneCallParser

CALL = '<tool_call>\n{"name": "fox", "arguments": {"a": "}"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "fox", "arguments": {"a": oops</tool_call>'
# output, its content, the arguments of its calls
ANSWERS = {
    "one": (CALL, None, ['{"a": "}"}']),
    "two": (CALL * 2, None, ['{"a": "}"}']),
    "text around": (f"before {CALL} behind {CALL}", "before", ['{"a": "}"}']),
    "broken first": (f"{BROKEN} {CALL}{CALL}", f"{BROKEN}", ['{"a": "}"}']),
    "none": ("just text ", "just text ", []),
    "cut": (CALL[:30], CALL[:30], []),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "content", "arguments"), ANSWERS.values(), ids=ANSWERS)
def test_nothing_follows_the_first_whole_call(text: str, content: str | None, arguments: list[str], size: int) -> None:
    parser, message = OneCallParser(HermesParser(Calls({"fox"}))), Message()
    for start in range(0, len(text), size):
        message.add(parser.feed(text[start : start + size]))
    message.add(parser.finish())
    fields = message.fields()
    calls = fields.get("tool_calls", [])
    assert isinstance(calls, list)
    assert (fields["content"], [call["function"]["arguments"] for call in calls]) == (content, arguments)
    assert parser.num_calls == len(arguments)


def test_other_formats_too() -> None:
    parser = OneCallParser(LlamaJsonParser(Calls({"fox"})))
    deltas = [*parser.feed('{"name": "fox", "parameters": {}}; {"name": "fox", "parameters": {}}'), *parser.finish()]
    assert sum(isinstance(delta, CallStart) for delta in deltas) == parser.num_calls == 1
