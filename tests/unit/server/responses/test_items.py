"""Items to chat messages: what the model said in one turn is one message, results find their calls, ids and texts are kept."""

from typing import Any

import msgspec
import pytest

from paceline.errors import BadInputError
from paceline.server.openai.tool_requests import AssistantMessage, DeveloperMessage, SystemMessage, ToolMessage, UserMessage
from paceline.server.responses.items import Item, chat_messages, check_items, decode_items, encode_items, stored_item

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def read(*items: dict[str, Any]) -> list[Item]:
    read_items = msgspec.json.decode(msgspec.json.encode(items), type=list[Item])
    check_items(read_items)
    return read_items


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_roles_and_kinds_of_text() -> None:
    messages = chat_messages(
        [],
        read(
            {"role": "system", "content": "s"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "u"}, {"type": "input_text", "text": "v"}]},
            {
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
        ),
    )
    assert messages == [
        SystemMessage(content="s"), DeveloperMessage(content="d"), UserMessage(content="u\nv"), AssistantMessage(content="a"),
    ]  # fmt: skip


def test_one_turn_of_the_model_is_one_message() -> None:
    other = {**CALL, "call_id": "c2", "arguments": ""}
    (message, result) = chat_messages([], read(THOUGHT, said("let me see"), CALL, other, RESULT))
    assert isinstance(message, AssistantMessage)
    assert (message.reasoning_content, message.content) == ("hm", "let me see")
    assert [call.id for call in message.tool_calls or ()] == ["c1", "c2"]
    assert result == ToolMessage(content="42", tool_call_id="c1")


@pytest.mark.parametrize(
    ("items", "kinds"),
    [
        ([said("a"), said("b")], "aa"),
        ([CALL, said("b")], "aa"),
        ([CALL, THOUGHT, {**CALL, "call_id": "c2"}], "aa"),
        ([asked("x"), said("a"), asked("y"), said("b")], "uaua"),
        ([CALL, RESULT, said("b")], "ata"),
        ([asked("x"), THOUGHT], "u"),
        ([THOUGHT, asked("x")], "u"),
        ([THOUGHT, THOUGHT, said("x")], "a"),
    ],
)
def test_where_a_turn_ends(items: list[dict[str, Any]], kinds: str) -> None:
    letters = {UserMessage: "u", AssistantMessage: "a", ToolMessage: "t"}
    assert "".join(letters[type(message)] for message in chat_messages([], read(*items))) == kinds


def test_a_result_may_answer_a_call_of_an_earlier_response() -> None:
    messages = chat_messages(read(asked("x"), CALL), read(RESULT))
    assert [type(message) for message in messages] == [UserMessage, AssistantMessage, ToolMessage]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{}], "input.0.role"),
        ([{"type": "message"}], "input.0.role"),
        ([{"role": "user"}], "input.0.content"),
        ([asked("x"), {"type": "function_call", "name": "f", "arguments": "{}"}], "input.1.call_id"),
        ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input.0.name"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input.0.arguments"),
        ([{**CALL, "arguments": "{"}], "input.0.arguments"),
        ([{**CALL, "arguments": "[1]"}], "input.0.arguments"),
        ([{**CALL, "arguments": "[" * 5000}], "input.0.arguments"),
        ([{"type": "function_call_output", "call_id": "c"}], "input.0.output"),
        ([RESULT], "input.0.call_id"),
        ([RESULT, CALL], "input.0.call_id"),
        ([{**CALL, "call_id": f"c{index}"} for index in range(129)], "input.128"),
    ],
)
def test_items_that_cannot_stand_there(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(BadInputError) as caught:
        chat_messages([], read(*items))
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


def test_stored_items_say_the_same_and_have_ids() -> None:
    items = read(asked("x"), {**THOUGHT}, {**CALL, "id": "fc_mine"}, RESULT, said("b"), {"role": "developer", "content": "d"})
    stored = [stored_item(item) for item in items]
    assert [item["id"].split("_")[0] for item in stored] == ["msg", "rs", "fc", "fco", "msg", "msg"]  # type: ignore[attr-defined]
    assert (stored[1]["id"], stored[2]["id"]) == ("rs_1", "fc_mine")
    assert len({item["id"] for item in stored}) == len(stored)
    again = decode_items([encode_items(stored[:2]), encode_items(stored[2:])])
    assert chat_messages([], again) == chat_messages([], items)
