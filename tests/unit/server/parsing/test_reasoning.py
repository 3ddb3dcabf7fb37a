"""Reasoning before the answer: whether the output or the prompt opens the block, and however the text is cut."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.parsing.deltas import ContentDelta, PlainParser, ReasoningDelta
from paceline.server.parsing.hermes import HermesParser
from paceline.server.parsing.reasoning import ReasoningParser
from tests.fakes.output_player import calls, check_every_cut, cut_at, message, play, streamed

FRAGMENTS = ["<think>", "</think>", "<", "</", "<th", "think>", "\n", " ", "thought", "é", "<tool_call>", '{"name": "f"}', "</tool_call>"]


def closed() -> ReasoningParser:
    return ReasoningParser(PlainParser(), is_open=False)


def opened() -> ReasoningParser:
    return ReasoningParser(PlainParser(), is_open=True)


def with_tools() -> ReasoningParser:
    return ReasoningParser(HermesParser(calls()), is_open=False)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>why</think>because", "why", "because"),
        ("\n<think>\nfirst\n\nsecond \n</think>\n\nanswer\n", "first\n\nsecond", "answer\n"),
        ("<think>\n\n</think>\n\nanswer", None, "answer"),
        ("<think></think>", None, ""),
        ("<think>a <think> b </thin </think>c</think>", "a <think> b </thin", "c</think>"),
        ("<think>cut off </thi", "cut off </thi", ""),
        ("<think>", None, ""),
        ("  plain answer\n", None, "  plain answer\n"),
        ("the <think> tag", None, "the <think> tag"),
        (" <thi", None, " <thi"),
        (" <thinker>", None, " <thinker>"),
        ("</think>x", None, "</think>x"),
        ("", None, ""),
    ],
)
def test_the_output_opens_the_block(text: str, reasoning: str | None, content: str) -> None:
    expected = {"content": content} if reasoning is None else {"content": content, "reasoning_content": reasoning}
    assert check_every_cut(closed, text) == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nwhy\n</think>\n\nbecause", "why", "because"),
        ("</think>because", None, "because"),
        ("\n</think>\n", None, ""),
        ("<think>\nwhy</think>because", "why", "because"),
        ("why</think", "why</think", ""),
        ("<thi", "<thi", ""),
        ("<thi</think>x", "<thi", "x"),
        ("< </think>x", "<", "x"),
        ("\n", None, ""),
    ],
)
def test_the_prompt_opens_the_block(text: str, reasoning: str | None, content: str) -> None:
    expected = {"content": content} if reasoning is None else {"content": content, "reasoning_content": reasoning}
    assert check_every_cut(opened, text) == expected


def test_calls_follow_reasoning_and_do_not_stand_in_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    expected = {"content": None, "reasoning_content": f"maybe {call}", "tool_calls": [("c0", "f", '{"a": 1}')]}
    assert check_every_cut(with_tools, f"<think>maybe {call}</think>\n\n{call}") == expected
    assert check_every_cut(with_tools, call) == {"content": None, "tool_calls": [("c0", "f", '{"a": 1}')]}


def test_text_leaves_as_it_comes() -> None:
    said = [list(deltas) for deltas in play(closed(), ["<think>", "a", " b ", "</thi", "x ", "</think>", "\n", "c ", "d"])]
    assert said == [
        [], [ReasoningDelta("a")], [ReasoningDelta(" b")], [], [ReasoningDelta(" </thix")], [], [],
        [ContentDelta("c ")], [ContentDelta("d")], [],
    ]  # fmt: skip


def reference(text: str, is_open: bool) -> dict[str, str]:
    """The same on the whole text, with Python's own functions."""
    body = text.lstrip(" \t\n\r")
    if not is_open and not body.startswith("<think>"):
        return {"content": text}
    reasoning, _, answer = body.removeprefix("<think>").partition("</think>")
    reasoning, answer = reasoning.strip(" \t\n\r"), answer.lstrip(" \t\n\r")
    return {"content": answer, "reasoning_content": reasoning} if reasoning else {"content": answer}


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=16), is_open=st.booleans(), places=st.lists(st.integers(0, 100), max_size=9))
def test_any_cut_of_any_text(fragments: list[str], is_open: bool, places: list[int]) -> None:
    pieces = cut_at("".join(fragments), places)
    expected = reference("".join(fragments), is_open)
    assert message(ReasoningParser(PlainParser(), is_open), pieces) == expected
    assert streamed(ReasoningParser(PlainParser(), is_open), pieces) == expected


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=16), is_open=st.booleans(), places=st.lists(st.integers(0, 100), max_size=9))
def test_any_cut_with_calls(fragments: list[str], is_open: bool, places: list[int]) -> None:
    """The answer's parser gets the same text, whoever cut it."""
    text = "".join(fragments)
    alone = reference(text, is_open)
    answer = message(HermesParser(calls()), [alone["content"]])
    if "reasoning_content" in alone:
        answer["reasoning_content"] = alone["reasoning_content"]
    assert message(ReasoningParser(HermesParser(calls()), is_open), cut_at(text, places)) == answer


@pytest.mark.parametrize("unit", ["<", "<think>", "</think>", "\n", "a\n", "</thin"])
@pytest.mark.parametrize("is_open", [True, False])
def test_hostile_text_costs_little(unit: str, is_open: bool) -> None:
    text = unit * (60_000 // len(unit))
    for pieces in ([text], itertools.chain(text)):
        began_s = time.process_time()
        assert sum(len(deltas) for deltas in play(ReasoningParser(HermesParser(calls()), is_open), pieces)) >= (unit != "\n")
        assert time.process_time() - began_s < 5  # quadratic work takes minutes
