"""Bad bodies get a 400 that names the field; what asks for nothing is accepted; every option is passed on or refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from paceline.errors import BadInputError, NotFoundError
from paceline.server.openai.requests import ChatCompletionRequest, GenerationRequest
from paceline.server.openai.structured import ResponseFormat
from paceline.server.openai.unsupported import _NEUTRAL_IN_RESPONSE
from paceline.server.responses.requests import (
    ResponseRequest,
    ResponseTextOptions,
    chat_request,
    in_our_terms,
    read_response_request,
    response_format,
)
from tests.unit.server.conftest import Site

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "fox"}
LOGPROBS = "message.output_text.logprobs"

BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": "computer_call_output"}]}, "input.0.type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": "x" * 10**6}, "input"),
    ({"input": "fox " * 800}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": "many"}, "top_k"),
    ({"seed": 2**65}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "x"}, "guided_regex"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"reasoning": {"summary": "auto"}}, "reasoning"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools.1.name"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools.0.parameters"),
    ({"tools": [{**TOOL, "parameters": {"x": "y" * 70_000}}]}, "tools.0.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "fox"}}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"include": ["everything"]}, "include.0"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
    ({"user": "x" * 513}, "user"),
    ({"truncation": "middle"}, "truncation"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"previous_response_id": "x" * 300}, "previous_response_id"),
    ({"stream": "yes"}, "stream"),
]


async def test_what_cannot_be_is_a_400_that_names_the_field(site: Site) -> None:
    """One server for all: to start one takes longer than to refuse."""
    for given, param in BAD:
        body = {"input": "hi", **given}
        answer = await site.post(PATH, {name: value for name, value in body.items() if value is not None})
        assert answer.status == 400, (param, answer.body[:500])
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert "max_completion_tokens" not in error["message"] or param == "max_completion_tokens"
    assert not site.engine.requests
    assert len(site.server._responses._store) == 0


async def test_no_json_is_a_400(site: Site) -> None:
    for body in (b"", b"[]", b"{", b'{"input": "' + b"\xff" + b'"}', b'{"input": ' + b"[" * 100_000):
        assert (await site.post(PATH, body)).status == 400, body[:20]


async def test_a_model_that_is_not_here_is_a_404(site: Site) -> None:
    answer = await site.post(PATH, {"input": "hi", "model": "gpt"})
    assert (answer.status, answer.json()["error"]["param"]) == (404, "model")


HARMLESS: list[dict[str, Any]] = [
    {"n": 1, "reasoning": {"effort": None, "summary": None}, "truncation": "disabled", "text": {"format": {"type": "text"}}},
    {"reasoning": {}, "text": {"verbosity": "medium"}, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": False},
    {"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "no_such_option": [1]},
    {"tools": [], "tool_choice": "auto", "top_logprobs": 0, "metadata": {}, "previous_response_id": None, "conversation": None},
    {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": True, "stream_options": {"include_obfuscation": False}},
    {
        "input": [{"role": "user", "content": "x", "phase": "commentary", "id": "m", "status": "completed"}],
        "store": None,
        "background": None,
    },
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_asks_for_nothing_is_accepted(site: Site, stream: bool) -> None:
    for given in HARMLESS:
        answer = await site.post(PATH, {"input": "hi", "stream": stream, **given})
        assert answer.status == 200, (given, answer.body)


async def test_a_stored_response_does_not_stream(site: Site) -> None:
    body = (await site.post(PATH, {"input": "hi"})).json()
    answer = await site.get(f"{PATH}/{body['id']}?stream=true")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "stream")
    assert (await site.get(f"{PATH}/{body['id']}?stream=false")).status == 200


async def test_too_long_a_conversation(site: Site) -> None:
    body = (await site.post(PATH, {"input": "hi", "max_output_tokens": 5})).json()
    site.server._responses._store._records[b"", body["id"]].turns = (
        b"[" + b'{"role":"user","content":""},' * 4095 + b'{"type":"reasoning"}]',
    )
    refused = await site.post(PATH, {"input": "hi", "previous_response_id": body["id"]})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "input")
    assert "limit 4,096" in refused.json()["error"]["message"]


def test_every_option_of_chat_is_passed_on_or_refused() -> None:
    """A new option must be thought of here, or it would be taken and forgotten."""
    values: dict[str, Any] = {
        "model": "m", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [7],
        "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0},
        "bad_words": ["x"], "min_tokens": 2, "stream": True, "max_draft_length": 1, "cache_salt": "x", "guided_regex": "x",
        "guided_choice": ["x"], "guided_grammar": "x", "guided_json": {"a": 1}, "structured_outputs": {"regex": "y"},
    }  # fmt: skip
    ignored = {"stream_options"}  # usage always comes with the end
    refused = {name for name in GenerationRequest.__struct_fields__ if name in _NEUTRAL_IN_RESPONSE}
    assert set(GenerationRequest.__struct_fields__) == values.keys() | ignored | refused
    request = read_response_request(msgspec.json.encode({"input": "hi", **values}))
    chat = chat_request(request, [])
    plain = GenerationRequest()
    for name in values:
        assert getattr(chat, name) == getattr(request, name) != getattr(plain, name), name


def test_chat_fields_of_this_route() -> None:
    body = {
        "input": "hi", "max_output_tokens": 7, "include": [LOGPROBS], "top_logprobs": 2,
        "tools": [{**TOOL, "description": "d", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "fox"}, "prediction": {"type": "content", "content": "p"},
    }  # fmt: skip
    chat = chat_request(read_response_request(msgspec.json.encode(body)), [])
    as_chat = {
        "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "fox", "description": "d", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "fox"}}, "prediction": {"type": "content", "content": "p"},
    }  # fmt: skip
    assert msgspec.json.encode(chat) == msgspec.json.encode(msgspec.json.decode(msgspec.json.encode(as_chat), type=ChatCompletionRequest))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
        ),
        (
            {"format": {"type": "json_schema", "name": "x", "schema": {}, "description": "d"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "description": "d"}},
        ),
    ],
)
def test_the_format_of_the_text_in_chats_form(given: dict[str, Any] | None, expected: dict[str, Any] | None) -> None:
    text = None if given is None else msgspec.json.decode(msgspec.json.encode(given), type=ResponseTextOptions)
    assert response_format(text) == (None if expected is None else msgspec.json.decode(msgspec.json.encode(expected), type=ResponseFormat))


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (BadInputError("messages: x", param="messages"), "input", "input: x"),
        (BadInputError("max_completion_tokens is 9", param="max_completion_tokens"), "max_output_tokens", "max_output_tokens is 9"),
        (BadInputError("tools.3.function.name: x", param="tools.3.function.name"), "tools.3.name", "tools.3.name: x"),
        (
            BadInputError("response_format.json_schema.schema: x", param="response_format.json_schema.schema"),
            "text.format.schema",
            "text.format.schema: x",
        ),
        (NotFoundError("no", param="model", code="model_not_found"), "model", "no"),
        (BadInputError("the template refuses these messages: no", param="messages"), "input", "the template refuses these messages: no"),
        (BadInputError("no"), None, "no"),
    ],
)
def test_errors_of_chat_get_the_names_of_this_route(error: BadInputError, param: str | None, message: str) -> None:
    ours = in_our_terms(error)
    assert (ours.param, str(ours), ours.code, type(ours)) == (param, message, error.code, type(error))


async def test_options_that_are_refused_are_not_described(make_site: Callable[..., Site]) -> None:
    described = (await make_site().get("/openapi.json")).json()["components"]["schemas"]["ResponseRequest"]["properties"]
    assert "max_output_tokens" in described
    assert not described.keys() & _NEUTRAL_IN_RESPONSE.keys()


def test_a_text_is_the_users_message(make_site: Callable[..., Site]) -> None:
    request = ResponseRequest(input="hi")
    assert [(item.role, item.content) for item in request.items] == [("user", "hi")]
