"""Tools and turns with calls: what types refuse, what the checks refuse with the field's name, and what templates get."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import BadInputError
from paceline.server.openai.tool_requests import (
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    ChatMessage,
    ToolChoice,
    ToolOffer,
    Tools,
    num_chars,
    template_messages,
    tool_offer,
)
from paceline.server.template import ChatTemplate

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = {"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": [1, 2.5, null]}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "rain"}
USER = {"role": "user", "content": "hi"}


def offer(tools: Any, choice: Any = None) -> ToolOffer:
    return tool_offer(decode_tools(tools), decode_choice(choice))


def decode_tools(tools: Any) -> Any:
    return msgspec.json.decode(json.dumps(tools), type=Tools | None)


def decode_choice(choice: Any) -> Any:
    return msgspec.json.decode(json.dumps(choice), type=ToolChoice | None)


def decode_messages(*messages: dict[str, Any]) -> list[ChatMessage]:
    return msgspec.json.decode(json.dumps(messages), type=list[ChatMessage])


def turned(*messages: dict[str, Any]) -> list[dict[str, object]]:
    return template_messages(decode_messages(*messages))


def called(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        (None, None, ToolOffer()),
        ([], "auto", ToolOffer()),
        (None, "none", ToolOffer()),
        ([WEATHER, TIME], None, ToolOffer((WEATHER, TIME), ("get_weather", "time"))),
        ([WEATHER, TIME], "auto", ToolOffer((WEATHER, TIME), ("get_weather", "time"))),
        ([WEATHER, TIME], "none", ToolOffer()),
        ([WEATHER, TIME], "required", ToolOffer((WEATHER, TIME), ("get_weather", "time"), must_call=True)),
        ([WEATHER, TIME], called("time"), ToolOffer((WEATHER, TIME), ("time",), must_call=True, is_single=True)),
    ],
)
def test_offers(tools: Any, choice: Any, expected: ToolOffer) -> None:
    assert offer(tools, choice) == expected


def test_templates_get_the_fields_in_order_and_no_others() -> None:
    tool = {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "description": "Now", "name": "f", "x": 1}, "type": "function"}
    described = offer([tool]).tools
    assert json.dumps(described[0]) == (
        '{"type": "function", "function": {"name": "f", "description": "Now", "parameters": {"b": 1, "a": 2}}}'
    )
    assert offer([{"type": "function", "function": {"name": "f", "parameters": None}}]).tools[0]["function"] == {"name": "f"}


def with_parameters(source: str) -> str:
    return '[{"type": "function", "function": {"name": "f", "parameters": ' + source + "}}]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[]", "must be a JSON object"),
        ('"{}"', "must be a JSON object"),
        ("true", "must be a JSON object"),
        ('{"a": 1' + "0" * 400 + ".5e999}", "not valid JSON"),
        (json.dumps({"a": "x" * MAX_SCHEMA_BYTES}), r"the schema has 65,\d\d\d bytes, limit 65,536"),
    ],
)
def test_bad_schemas(source: str, message: str) -> None:
    tools = msgspec.json.decode(with_parameters(source), type=Tools)
    with pytest.raises(BadInputError, match=message) as caught:
        tool_offer(tools, None)
    assert caught.value.param == "tools.0.function.parameters"


def test_deep_schemas() -> None:
    """What msgspec reads of a body it can also read again here; deeper ones are refused with the body."""
    tools = msgspec.json.decode(with_parameters('{"a":' * 500 + "1" + "}" * 500), type=Tools)
    assert tool_offer(tools, None).names == ("f",)
    with pytest.raises(RecursionError):
        msgspec.json.decode(with_parameters('{"a":' * 5000 + "1" + "}" * 5000), type=Tools)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([WEATHER, TIME, WEATHER], None, "tools.2.function.name"),
        ([WEATHER], called("time"), "tool_choice"),
        (None, called("time"), "tool_choice"),
        ([], "required", "tool_choice"),
        (None, "required", "tool_choice"),
    ],
)
def test_offers_that_contradict_themselves(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(BadInputError) as caught:
        offer(tools, choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "custom", "custom": {"name": "f"}}],
        [{"function": {"name": "f"}}],
        [{"type": "function"}],
        [{"type": "function", "function": {}}],
        [called("")],
        [called("a b")],
        [called("a\n")],
        [called("é")],
        [called("x" * 65)],
        [called(f"f{index}") for index in range(MAX_TOOLS + 1)],
        {},
    ],
)
def test_tools_of_a_wrong_form(tools: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_tools(tools)


def test_as_many_tools_as_allowed() -> None:
    assert len(offer([called(f"a-b_c.{index}") for index in range(MAX_TOOLS)]).names) == MAX_TOOLS


@pytest.mark.parametrize("choice", ["any", {"type": "custom"}, {"type": "function"}, {"type": "function", "function": {}}, 1])
def test_choices_of_a_wrong_form(choice: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_choice(choice)


def test_turns_become_what_templates_expect() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    function = {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5, None]}}
    assert turned(
        {"role": "developer", "content": "be brief"}, {"role": "system", "content": ""}, {"role": "user", "content": parts, "name": "Ann"},
        CALLED, RESULT | {"content": parts}, {"role": "assistant", "content": "done", "reasoning_content": "well"},
    ) == [
        {"role": "system", "content": "be brief"}, {"role": "system", "content": ""}, {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "content": "a\nb", "tool_call_id": "c0", "name": "get_weather"},
        {"role": "assistant", "content": "done", "reasoning_content": "well"},
    ]  # fmt: skip


async def test_a_real_template_takes_them() -> None:
    template = ChatTemplate((TEMPLATES / "qwen2.5-coder.jinja").read_text(encoding="utf-8"), {})
    text = await template.render(turned(USER, CALLED, RESULT), offer([WEATHER]).tools)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5, null]}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text


def with_arguments(arguments: str) -> dict[str, Any]:
    return CALLED | {"tool_calls": [CALL, CALL | {"function": {"name": "any name", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ["", " ", "{}", " {} "])
def test_a_call_without_arguments(arguments: str) -> None:
    calls = turned(with_arguments(arguments))[0]["tool_calls"]
    assert isinstance(calls, list)
    assert calls[1]["function"] == {"name": "any name", "arguments": {}}


@pytest.mark.parametrize(
    "arguments", ["[]", "null", "1", '{"a": ', "{'a': 1}", '{"a": 1} x', '{"a": "\\ud800"}', '{"a":' * 5000 + "1" + "}" * 5000]
)
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(BadInputError) as caught:
        turned(USER, with_arguments(arguments))
    assert caught.value.param == "messages.1.tool_calls.1.function.arguments"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ((USER, RESULT), "messages.1.tool_call_id"),
        ((RESULT, CALLED), "messages.0.tool_call_id"),
        ((CALLED, RESULT | {"tool_call_id": "c1"}), "messages.1.tool_call_id"),
        ((USER, {"role": "assistant"}), "messages.1.content"),
        ((USER, {"role": "assistant", "content": None, "tool_calls": []}), "messages.1.content"),
    ],
)
def test_turns_out_of_place(messages: tuple[dict[str, Any], ...], param: str) -> None:
    with pytest.raises(BadInputError) as caught:
        turned(*messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "name": "f", "content": "x"},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": ""},
        {"role": "tool", "content": "x", "tool_call_id": "x" * 257},
        CALLED | {"tool_calls": [{"id": "c0", "function": {"name": "f", "arguments": {}}}]},
        CALLED | {"tool_calls": [{"id": "c0", "function": {"name": "", "arguments": "{}"}}]},
        CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        CALLED | {"tool_calls": [CALL] * 129},
    ],
)
def test_turns_of_a_wrong_form(message: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_messages(message)


def test_characters_are_counted_with_those_of_calls() -> None:
    messages = decode_messages(
        USER, CALLED | {"reasoning_content": "why"}, RESULT, {"role": "user", "content": [{"type": "text", "text": "abc"}]}
    )
    arguments: str = CALL["function"]["arguments"]  # type: ignore[index]
    assert [num_chars(message) for message in messages] == [2, 3 + len("get_weather") + len(arguments), 4, 3]
