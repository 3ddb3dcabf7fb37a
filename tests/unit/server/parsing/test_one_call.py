"""The first whole call ends the answer, wherever the text is cut; calls that break off do not count."""

import pytest

from paceline.server.parsing.call import Calls
from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, ContentDelta, MessageDelta
from paceline.server.parsing.hermes import HermesParser
from paceline.server.parsing.llama_json import LlamaJsonParser
from paceline.server.parsing.one_call import OneCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 1} oh'


def read(text: str, size: int, one: bool = True) -> list[MessageDelta]:
    """Parts of a text fed in pieces of `size` characters, neighbours of one kind joined."""
    parser = HermesParser(Calls(["f"], new_id=lambda: "id"))
    outer = OneCallParser(parser) if one else parser
    parts = [part for start in range(0, len(text), size) for part in outer.feed(text[start : start + size])]
    parts += outer.finish()
    joined: list[MessageDelta] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    assert outer.num_calls == int(one and any(isinstance(part, CallArguments) and part.text.endswith("}") for part in joined)) or not one
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL + CALL, [CallStart(0, "id", "f"), CallArguments(0, '{"a": 1}')]),
        (f"x {CALL} y {CALL}", [ContentDelta("x"), CallStart(0, "id", "f"), CallArguments(0, '{"a": 1}')]),
        (
            BROKEN + CALL + CALL,
            [
                CallStart(0, "id", "f"), CallArguments(0, '{"a": 1'), CallBroken(0), ContentDelta(BROKEN),
                CallStart(1, "id", "f"), CallArguments(1, '{"a": 1}'),
            ],
        ),
    ],
)  # fmt: skip
def test_what_follows_the_first_whole_call_is_left_out(text: str, expected: list[MessageDelta]) -> None:
    for size in (*range(1, 17), 1000):
        assert read(text, size) == expected, size


@pytest.mark.parametrize("text", ["no call", CALL, BROKEN, '<tool_call>{"name": "f", "arg', "x <tool", f"a {CALL}"])
def test_what_holds_at_most_one_call_is_left_as_it_is(text: str) -> None:
    for size in (*range(1, 17), 1000):
        assert read(text, size) == read(text, size, one=False), size


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_around_another_format(size: int) -> None:
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}'
    parser = OneCallParser(LlamaJsonParser(Calls(["f"], new_id=lambda: "id")))
    parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
    parts += parser.finish()
    assert [part for part in parts if not isinstance(part, CallArguments)] == [CallStart(0, "id", "f")]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"a": 1}'
    assert parser.num_calls == 1
