"""OpenAI's shapes of what parsers say: whole messages, and chunks that a client adds up to the same."""

import json

import msgspec
import pytest

from paceline.core.request import FinishReason
from paceline.server.openai.messages import Message, delta_fields, finish_reason
from paceline.server.parsing.deltas import CallArguments, CallBroken, CallStart, ContentDelta, MessageDelta, ReasoningDelta

DELTAS: list[MessageDelta] = [
    ReasoningDelta("why"),
    ReasoningDelta("?"),
    ContentDelta("so\n"),
    CallStart(0, "call_a", "f"),
    CallArguments(0, '{"a": '),
    CallArguments(0, '"é"}'),
    CallStart(1, "call_b", "g"),
    CallArguments(1, "{}"),
    ContentDelta("done"),
]
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def fields_of(deltas: list[MessageDelta]) -> object:
    whole = Message()
    whole.add(deltas)
    return json.loads(msgspec.json.encode(whole.fields()))


def test_a_whole_message() -> None:
    assert fields_of(DELTAS) == {"role": "assistant", "content": "so\ndone", "reasoning_content": "why?", "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("deltas", "fields"),
    [
        ([], {"role": "assistant", "content": ""}),
        ([ContentDelta("x")], {"role": "assistant", "content": "x"}),
        ([ReasoningDelta("x")], {"role": "assistant", "content": "", "reasoning_content": "x"}),
        (DELTAS[6:8], {"role": "assistant", "content": None, "tool_calls": CALLS[1:]}),
    ],
)
def test_what_is_not_there_is_left_out(deltas: list[MessageDelta], fields: dict[str, object]) -> None:
    assert fields_of(deltas) == fields


def test_a_broken_call_is_not_in_the_message() -> None:
    deltas = [CallStart(0, "call_x", "f"), CallArguments(0, '{"a'), CallBroken(0), ContentDelta('{"a'), *DELTAS[6:8]]
    assert fields_of(deltas) == {"role": "assistant", "content": '{"a', "tool_calls": CALLS[1:]}


def test_one_chunk_carries_all_that_a_step_made() -> None:
    chunk = json.loads(msgspec.json.encode(delta_fields(DELTAS)))
    calls = [{"index": 0, **CALLS[0]}, {"index": 1, **CALLS[1]}]
    assert chunk == {"reasoning_content": "why?", "content": "so\ndone", "tool_calls": calls}


def test_chunks_of_one_call() -> None:
    assert delta_fields(DELTAS[3:4]) == {
        "tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}]
    }
    assert delta_fields(DELTAS[4:5]) == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}
    assert delta_fields(DELTAS[5:7]) == {
        "tool_calls": [
            {"index": 0, "function": {"arguments": '"é"}'}},
            {"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}},
        ]
    }
    assert delta_fields([CallBroken(0)]) == delta_fields([]) == {}


@pytest.mark.parametrize(
    ("reason", "num_calls", "name"),
    [
        (FinishReason.STOP, 0, "stop"),
        (FinishReason.STOP, 2, "tool_calls"),
        (FinishReason.LENGTH, 0, "length"),
        (FinishReason.LENGTH, 2, "length"),
    ],
)
def test_the_finish_reason(reason: FinishReason, num_calls: int, name: str) -> None:
    assert finish_reason(reason, num_calls) == name
