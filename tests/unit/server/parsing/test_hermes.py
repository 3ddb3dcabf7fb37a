"""Calls in tags: the same message however the text is cut, arguments as they come, and no text lost that is no call."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, ContentDelta, MessageDelta
from paceline.server.parsing.hermes import HermesParser
from tests.fakes.output_player import calls, check_every_cut, cut_at, is_object, message, play, streamed

ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(["<tool_call>", "</tool_call>", '{"}', "\\", "é😀"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
SPACES = st.sampled_from(["", "\n", " ", "\n\n", "\t\r\n"])
FRAGMENTS = [
    "```json", "``", "`", "{}",
    "<tool_call>", "</tool_call>", "<", "</", "<tool", "tool_call>", "{", "}", '"name"', '"arguments"', ":", ",", '"f"', '{"name": "f", ',
    '"arguments": {', '"a": 1', "}}", '"', "\\", "\\u00e", "[", "]", "1.5", "true", "\n", " ", "text", "é",
]  # fmt: skip


def parser() -> HermesParser:
    return HermesParser(calls())


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, [("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', None, [("f", "{}")]),
        ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', None, [("f", '{"a": [1, {}]}')]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', None, [("f", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "type": "function", "x": {"name": 1}, "name": "f", "arguments": {}}</tool_call>', None, [("f", "{}")]),
        ('<tool_call>{"n\\u0061me": "g\\"\\u00e9\\n", "arguments": {}}</tool_call>', None, [('g"é\n', "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "}{\\"</tool_call>\\u00e9\\\\"}}</tool_call>', None,
         [("f", '{"a": "}{\\"</tool_call>\\u00e9\\\\"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a":\t1 ,\n"b" : "é😀" } }</tool_call>', None, [("f", '{"a":\t1 ,\n"b" : "é😀" }')]),
        ('Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', "Let me see.", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', None, [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}', None, [("f", "{}"), ("g", "{}")]),
        ('\n<tool_call>{"name": "f"}</tool_call>\n\ndone\n', "done", [("f", "{}")]),
        ('a\n<tool_call>{"name": "f"}</tool_call>\nb <tool_call>{"name": "g"}</tool_call> ', "a\nb", [("f", "{}"), ("g", "{}")]),
        ('{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ('\n{"name": "f", "arguments": {}}\n{"arguments": {}, "name": "é"}\nand then', "and then", [("f", "{}"), ("é", "{}")]),
        ('{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>', None, [("f", "{}"), ("g", "{}")]),
        ('```json\n{\n  "name": "f",\n  "arguments": {\n    "a": "```"\n  }\n}\n```', None, [("f", '{\n    "a": "```"\n  }')]),
        (' ```json{"name": "f", "arguments": {}}```\n\n```json\n{"name": "é", "arguments": {}}\n```\n', None, [("f", "{}"), ("é", "{}")]),
        ('```json\n{"name": "f", "arguments": {}}\n```\nIt works.\n', "It works.", [("f", "{}")]),
        ('```json\n{"name": "f", "arguments": {}}\n``', "``", [("f", "{}")]),
        ('```json\n{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}', None, [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f"}}\n</tool_call>', "}\n</tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": "f"}\n</tool_cal', "</tool_cal", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call><', "<", [("f", "{}")]),
    ],
)  # fmt: skip
def test_calls(text: str, content: str | None, found: list[tuple[str, str]]) -> None:
    expected: dict[str, Any] = {"content": content, "tool_calls": [(f"c{index}", *call) for index, call in enumerate(found)]}
    assert check_every_cut(parser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "  white space \n stays \n\n",
        "a <tool_call> is a tag, <tool_call",
        "<tool_call>",
        "<tool_call>\n\n",
        "</tool_call>",
        '{"name": "other", "arguments": {}}',
        '{"name": "f"}',
        '{"arguments": {}}',
        'so {"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '```json\n{"name": "other", "arguments": {}}\n```',
        '```json\n[{"name": "f", "arguments": {}}]\n```',
        "```python\nprint(1)\n```",
        '```{"name": "f", "arguments": {}}',
        "``",
        " ```json",
        "if a < b and <tool> or <tool_calls>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": {"a": "',
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, }</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"\\ud800": 1, "name": "f"}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        '<tool_call>f({"a": 1})</tool_call>',
        "<tool_call>__import__('os').system('id')</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000,
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    """All of it, cut off or not: bad JSON, no name, arguments that are no object, nesting without end."""
    if len(text) < 1000:
        assert check_every_cut(parser, text) == {"content": text}
    assert message(parser(), [text]) == streamed(parser(), [text]) == {"content": text}


def test_a_call_after_a_broken_one() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    broken = '<tool_call>{"name": "f", "arguments": {"a":'
    expected = {"content": broken, "tool_calls": [("c1", "f", '{"a": 1}')]}
    assert check_every_cut(parser, broken + good) == expected
    assert check_every_cut(parser, f"{good}\n{broken}") == {"content": broken, "tool_calls": [("c0", "f", '{"a": 1}')]}


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["", "some text", "a < b", "<b>é</b>"]), st.sampled_from(["f", "get_weather", "é"]), ARGUMENTS, SPACES, SPACES
        ),
        max_size=4,
    ),
    after=st.sampled_from(["", "end"]),
    indent=st.none() | st.just(1),
    is_ascii=st.booleans(),
    places=st.lists(st.integers(0, 2000), max_size=12),
)
def test_any_cut_of_any_calls_gives_them_back(
    parts: list[tuple[str, str, dict[str, Any], str, str]], after: str, indent: int | None, is_ascii: bool, places: list[int]
) -> None:
    """Against the parts that the text was made of, not against another run of the parser."""
    text, found = "", []
    for index, (before, name, arguments, inner, outer) in enumerate(parts):
        source = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
        name_source = json.dumps(name, ensure_ascii=is_ascii)
        text += f'{before}{outer}<tool_call>{inner}{{"name": {name_source}, "arguments": {source}}}{inner}</tool_call>'
        found.append((f"c{index}", name, source))
    text += after
    content = "".join(before for before, *_ in parts) + after
    expected: dict[str, Any] = {"content": content or (None if found else "")}
    if found:
        expected["tool_calls"] = found
    assert message(parser(), cut_at(text, places)) == expected
    assert streamed(parser(), cut_at(text, places)) == expected
    assert all(json.loads(source) == arguments for (_, _, source), (_, _, arguments, _, _) in zip(found, parts, strict=True))


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=24), places=st.lists(st.integers(0, 200), max_size=12))
def test_scrambled_calls(fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments)
    whole = message(parser(), [text])
    assert message(parser(), cut_at(text, places)) == streamed(parser(), cut_at(text, places)) == whole
    assert message(parser(), text) == whole
    found = whole.get("tool_calls", [])
    assert all(is_object(arguments) for _, _, arguments in found)
    if not found:
        assert whole["content"] == text


def said(pieces: list[str]) -> list[list[MessageDelta]]:
    return [list(deltas) for deltas in play(parser(), pieces)]


def test_arguments_leave_as_they_come() -> None:
    pieces = ["<tool_call>", '{"name": "f"', ', "arguments": ', '{"a"', ': "x', "y", '"}', "}", "</tool_call>"]
    assert said(pieces) == [
        [], [], [], [CallStart(0, "c0", "f"), CallArguments(0, '{"a"')], [CallArguments(0, ': "x')], [CallArguments(0, "y")],
        [CallArguments(0, '"')], [CallArguments(0, "}")], [], [],
    ]  # fmt: skip


def test_what_looks_like_a_tag_leaves_once_it_is_none() -> None:
    assert said(["a <", "b", " <tool", "_cal", "m", "\n", "<tool_call>", "x"]) == [
        [ContentDelta("a")], [ContentDelta(" <b")], [], [], [ContentDelta(" <tool_calm")], [], [],
        [ContentDelta("\n<tool_call>"), ContentDelta("x")], [],
    ]  # fmt: skip


def test_an_answer_in_json_leaves_once_it_is_no_call() -> None:
    assert said(["```js", "on\n{", '"rows"', ": [1"]) == [[], [], [ContentDelta('```json\n{"rows"')], [ContentDelta(": [1")], []]


def test_a_call_that_breaks_late() -> None:
    """A stream has part of it: what it has is no JSON, and the whole text follows."""
    pieces = ['<tool_call>{"name": "f", "arguments": {"a": 1}', ' "b"', " after"]
    assert said(pieces) == [
        [CallStart(0, "c0", "f"), CallArguments(0, '{"a": 1')],
        [CallBroken(0), ContentDelta('<tool_call>{"name": "f", "arguments": {"a": 1}'), ContentDelta(' "b"')],
        [ContentDelta(" after")],
        [],
    ]
    assert said(pieces[:1])[-1] == [CallBroken(0), ContentDelta(pieces[0])]


@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"name":"f"}',
        '<tool_call>{"name":"f"}x',
        "\n",
        "`",
        '{"name":"f","arguments":{}}',
        "a\n",
        '<tool_call>{"name":"f","arguments":{"a":"',
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_hostile_text_costs_little(unit: str, is_whole: bool) -> None:
    text = unit * (60_000 // len(unit))
    began_s = time.process_time()
    num_deltas = sum(len(deltas) for deltas in play(parser(), [text] if is_whole else itertools.chain(text)))
    assert num_deltas > 0
    assert time.process_time() - began_s < 5  # quadratic work takes minutes
