"""Anthropic's turns and tools as chat has them: every block becomes what a chat template shows, or is refused under its own name."""

import json
from typing import Any

import pytest

from paceline.errors import BadInputError
from paceline.server.anthropic.conversion import ChatForm, chat_form
from paceline.server.anthropic.requests import read_messages, read_prompt
from paceline.server.openai.requests import MAX_MESSAGES
from paceline.server.openai.tool_requests import template_messages, tool_offer

TOOL = {"name": "fox", "description": "jumps", "input_schema": {"type": "object", "properties": {"over": {}}}}
HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "fox", "input": {"over": [1, "日"]}}
OTHER_USE = {"type": "tool_use", "id": "t2", "name": "dog", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def form(**body: Any) -> ChatForm:
    return chat_form(read_messages(json.dumps({"max_tokens": 5, **body}).encode()))


def turns(*messages: dict[str, Any], **body: Any) -> list[dict[str, object]]:
    return template_messages(form(messages=messages, **body).request.messages)


def call(call_id: str, name: str, arguments: dict[str, object]) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_system_comes_first() -> None:
    for system in ("be brief", [text("be"), {**text("brief"), "cache_control": {"type": "ephemeral"}}]):
        first, second = turns(HI, system=system)
        assert first == {"role": "system", "content": system if isinstance(system, str) else "be\nbrief"}
        assert second == HI


def test_blocks_of_text_are_one_message() -> None:
    assert turns(said(text("a"), text("b"))) == [{"role": "user", "content": "a\nb"}]
    assert turns(said()) == [{"role": "user", "content": ""}]


def test_turns_of_one_role_in_a_row_are_one() -> None:
    messages = (HI, said(text("there")), {"role": "assistant", "content": "yes"}, said(text("sir"), role="assistant"), HI)
    assert turns(*messages) == [
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "yes\nsir"},
        HI,
    ]


def test_a_system_message_in_the_middle() -> None:
    assert [turn["role"] for turn in turns(HI, {"role": "system", "content": "be brief"}, HI)] == ["user", "system", "user"]


def test_calls_and_their_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "t2", "content": [text("no"), text("dog")], "is_error": True}
    assert turns(HI, said(text("I jump."), USE, OTHER_USE, role="assistant"), said(RESULT, result, text("go on"))) == [
        HI,
        {"role": "assistant", "content": "I jump.", "tool_calls": [call("t1", "fox", {"over": [1, "日"]}), call("t2", "dog", {})]},
        {"role": "tool", "content": "42", "tool_call_id": "t1", "name": "fox"},
        {"role": "tool", "content": "Error: no\ndog", "tool_call_id": "t2", "name": "dog"},
        {"role": "user", "content": "go on"},
    ]


def test_text_before_a_result_stays_before_it() -> None:
    roles = [turn["role"] for turn in turns(HI, said(USE, role="assistant"), said(text("look"), RESULT, text("so")), HI)]
    assert roles == ["user", "assistant", "user", "tool", "user"]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_result_may_say_nothing(content: object) -> None:
    assert turns(HI, said(USE, role="assistant"), said({**RESULT, "content": content}))[-1]["content"] == ""
    assert len(turns(HI, said(USE, role="assistant"), said(RESULT))) == 3, "no empty message behind results"


def test_thoughts_of_earlier_turns() -> None:
    """What only their maker can read is left out."""
    thoughts = ({"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}, text("yes"))
    assert turns(HI, said(*thoughts, role="assistant"), HI)[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_tools_are_offered() -> None:
    offer = tool_offer(form(messages=[HI], tools=[TOOL, {**TOOL, "name": "dog", "type": "custom"}]).request.tools, None)
    assert offer.names == ("fox", "dog")
    assert offer.tools[0] == {
        "type": "function",
        "function": {"name": "fox", "description": "jumps", "parameters": TOOL["input_schema"]},
    }


@pytest.mark.parametrize(
    ("choice", "names", "must_call"),
    [
        (None, ("fox", "dog"), False),
        ({"type": "auto"}, ("fox", "dog"), False),
        ({"type": "any"}, ("fox", "dog"), True),
        ({"type": "tool", "name": "dog"}, ("dog",), True),
        ({"type": "none"}, (), False),
    ],
)
def test_tool_choices(choice: object, names: tuple[str, ...], must_call: bool) -> None:
    request = form(messages=[HI], tools=[TOOL, {**TOOL, "name": "dog"}], tool_choice=choice).request
    offer = tool_offer(request.tools, request.tool_choice)
    assert (offer.names, offer.must_call) == (names, must_call)


def test_one_call_at_most() -> None:
    for kind in ("auto", "any"):
        body = {"messages": [HI], "tool_choice": {"type": kind, "disable_parallel_tool_use": True}}
        assert read_prompt(json.dumps(body).encode()).has_one_call
        body["tool_choice"] = {"type": kind}
        assert not read_prompt(json.dumps(body).encode()).has_one_call
    assert not read_prompt(json.dumps({"messages": [HI], "tool_choice": {"type": "none"}}).encode()).has_one_call


def test_options_are_chats() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_draft_length": 0, "min_tokens": 2, "stream": True}
    request = form(messages=[HI], stop_sequences=["a", "b"], prediction={"type": "content", "content": "x"}, **given).request
    assert {name: getattr(request, name) for name in given} == given
    assert (request.stops, request.max_tokens) == (("a", "b"), None)
    assert request.prediction is not None and request.prediction.text == "x"


@pytest.mark.parametrize(
    ("last", "is_continued"), [(HI, False), ({"role": "assistant", "content": "The"}, True), (said(role="assistant"), True)]
)
def test_a_last_message_of_the_assistant_is_continued(last: dict[str, Any], is_continued: bool) -> None:
    assert form(messages=[HI, last]).request.continue_final_message is is_continued


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown call": ({"messages": [said(RESULT)]}, "messages.0.content.0.tool_use_id", "no earlier message has a tool_use"),
    "result before its call": (
        {"messages": [said(RESULT), said(USE, role="assistant"), HI]}, "messages.0.content.0.tool_use_id", "no earlier message",
    ),
    "last turn calls": ({"messages": [HI, said(USE, role="assistant")]}, "messages.1", "send what they returned"),
    "last turns call": (
        {"messages": [HI, said(USE, role="assistant"), said(text("so"), role="assistant")]}, "messages.2", "send what they returned",
    ),
    "server tool": ({"messages": [HI], "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type", "has no tools of its own"),
    "no schema": ({"messages": [HI], "tools": [TOOL, {"name": "dog"}]}, "tools.1.input_schema", "is missing"),
    "examples": ({"messages": [HI], "tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples", "description"),
    "later": ({"messages": [HI], "tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "leave"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_chat_cannot_express(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        form(**body)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


NAMED_BY_CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "input that is no object": (
        {"messages": [HI, said(text("x"), OTHER_USE, {**USE, "input": [1]}, role="assistant"), HI], "system": "s"},
        "messages.1.content.2.input",
    ),
    "schema that is none": ({"messages": [HI], "tools": [TOOL, {"name": "dog", "input_schema": 5}]}, "tools.1.input_schema"),
    "two of one name": ({"messages": [HI], "tools": [TOOL, TOOL]}, "tools.1.name"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param"), NAMED_BY_CHAT.values(), ids=NAMED_BY_CHAT)
def test_chats_own_errors_name_the_field_that_was_sent(body: dict[str, Any], param: str) -> None:
    made = form(**body)
    check = template_messages if "tools" not in body else lambda _: tool_offer(made.request.tools, None)
    with pytest.raises(BadInputError) as caught:
        check(made.request.messages)
    error = made.explained(caught.value)
    assert error.param == param
    assert str(error).startswith(f"{param}: ")


def test_many_turns_of_one_role_cost_little() -> None:
    messages = [said(text("x"), role="assistant")] * (MAX_MESSAGES - 1) + [HI]
    assert [turn["role"] for turn in turns(*messages)] == ["assistant", "user"]
