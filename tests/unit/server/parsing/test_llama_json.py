"""Answers that are calls: with and without the tag, one or several; and every other answer, JSON or not, stays what it was."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.parsing.deltas import CallArguments, CallStart, ContentDelta
from paceline.server.parsing.llama_json import LlamaJsonParser
from tests.fakes.output_player import calls, check_every_cut, cut_at, is_object, message, play, streamed

FRAGMENTS = [
    "<|python_tag|>", "<|", "<", ";", "; ", '{"name": "f", "parameters": {}}', '{"name": "f", ', '"parameters": {', '"a": ";"', "}", "}}",
    '"', "{", "\n", "text", "é",
]  # fmt: skip


def parser() -> LlamaJsonParser:
    return LlamaJsonParser(calls())


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ('\n {"parameters": {"a": {"b": "};{"}}, "name": "f"}\n', None, [("f", '{"a": {"b": "};{"}}')]),
        ('{"type": "function", "name": "f", "parameters": {}}', None, [("f", "{}")]),
        ('{"name": "f", "arguments": {}}', None, [("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', None, [("f", "{}")]),
        (' <|python_tag|>\n{"name": "other", "parameters": {}}', None, [("other", "{}")]),
        ('<|python_tag|>{"name": "f"}', None, [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}',
            None,
            [("f", "{}"), ("get_weather", '{"a": 1}')],
        ),
        ('{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}};', None, [("f", "{}"), ("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}};{"name": "o", "parameters": {}}', None, [("f", "{}"), ("o", "{}")]),
        ('{"name": "f", "parameters": {}}\nThis calls f. ', "This calls f.", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "f"', '; {"name": "f"', [("f", "{}")]),
        ('{"name": "f", "parameters": {}} {"a": 1}', '{"a": 1}', [("f", "{}")]),
        ('{"name": "f", "parameters": {}};{"name": "f", "parameters": {}}; {"a"', '; {"a"', [("f", "{}"), ("f", "{}")]),
    ],
)
def test_calls(text: str, content: str | None, found: list[tuple[str, str]]) -> None:
    expected: dict[str, Any] = {"content": content, "tool_calls": [(f"c{index}", *call) for index, call in enumerate(found)]}
    assert check_every_cut(parser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain text ",
        'Here: {"name": "f", "parameters": {}}',
        '{"name": "Alice", "parameters": {"age": 3}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": null}',
        '{"name": "f", "parameters": {"a": 1}',
        '{"name": "f", "parameters": {"a": 1,}}',
        '{"parameters": {}}',
        '["f"]',
        "{}",
        '"name"',
        "3.5",
        "<",
        '<{"name": "f", "parameters": {}}',
        '<|python_{"name": "f", "parameters": {}}',
        "<|python_tag|>",
        "<|python_tag|>print(1)",
        '<|python_tag|>brave_search.call(query="x")',
        '```json\n{"name": "f", "parameters": {}}\n```',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert check_every_cut(parser, text) == {"content": text}


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=16), places=st.lists(st.integers(0, 200), max_size=12))
def test_scrambled_calls(fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments)
    whole = message(parser(), [text])
    assert message(parser(), cut_at(text, places)) == streamed(parser(), cut_at(text, places)) == whole
    assert message(parser(), text) == whole
    found = whole.get("tool_calls", [])
    assert all(is_object(arguments) for _, _, arguments in found)
    if not found:
        assert whole["content"] == text


@given(
    arguments=st.lists(
        st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans())), min_size=1, max_size=4
    ),
    tag=st.sampled_from(["", "<|python_tag|>"]),
    separator=st.sampled_from([";", "; ", ";\n", "\n"]),
    places=st.lists(st.integers(0, 500), max_size=12),
)
def test_any_cut_of_any_calls_gives_them_back(arguments: list[dict[str, object]], tag: str, separator: str, places: list[int]) -> None:
    sources = [json.dumps(item) for item in arguments]
    text = tag + separator.join(f'{{"name": "f", "parameters": {source}}}' for source in sources)
    found = [(f"c{index}", "f", source) for index, source in enumerate(sources)]
    assert message(parser(), cut_at(text, places)) == streamed(parser(), cut_at(text, places)) == {"content": None, "tool_calls": found}


def test_arguments_leave_as_they_come() -> None:
    said = [list(deltas) for deltas in play(parser(), ['{"name": "f", "param', 'eters": {"a":', " [1", ", 2]", "}", "}", ";"])]
    assert said == [
        [], [CallStart(0, "c0", "f"), CallArguments(0, '{"a":')], [CallArguments(0, " [1")], [CallArguments(0, ", 2]")], [],
        [CallArguments(0, "}")], [], [],
    ]  # fmt: skip


def test_an_answer_that_is_no_call_streams_at_once() -> None:
    said = [list(deltas) for deltas in play(parser(), ["{", '"na', 'me": "Bo', 'b", ', '"age": 3', "}"])]
    assert said == [[], [], [], [ContentDelta('{"name": "Bob"'), ContentDelta(",")], [ContentDelta(' "age": 3')], [ContentDelta("}")], []]


@pytest.mark.parametrize("unit", ["<", ";", '{"name":"f","parameters":{}}', '{"name":"f","parameters":{}};', "\n", '{"a":'])
@pytest.mark.parametrize("is_whole", [True, False])
def test_hostile_text_costs_little(unit: str, is_whole: bool) -> None:
    text = unit * (60_000 // len(unit))
    began_s = time.process_time()
    num_deltas = sum(len(deltas) for deltas in play(parser(), [text] if is_whole else itertools.chain(text)))
    assert num_deltas > 0
    assert time.process_time() - began_s < 5  # quadratic work takes minutes
