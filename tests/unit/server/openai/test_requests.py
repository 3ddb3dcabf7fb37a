"""Bodies of the wrong shape: a 400 in OpenAI's form that names the field, and nothing reaches the engine."""

from typing import Any

import pytest

from tests.unit.server.conftest import Site

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BAD_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"), ({"temperature": 101}, "temperature"), ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_p": "1"}, "top_p"),
    ({"top_k": -2}, "top_k"), ({"top_k": 1.5}, "top_k"), ({"top_k": True}, "top_k"),
    ({"min_p": -0.1}, "min_p"), ({"min_p": 1.1}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -5}, "max_tokens"), ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 10**40}, "max_tokens"), ({"max_tokens": 2**62}, "max_tokens"),
    ({"seed": 2**64}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"seed": 1.5}, "seed"), ({"seed": "1"}, "seed"),
    ({"stop": 5}, "stop"), ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop.1"), ({"stop": ["a", 5]}, "stop.1"),
    ({"stop": ["x"] * 17}, "stop"), ({"stop": "x" * 1025}, "stop"), ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [320]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": 5}, "stop_token_ids"), ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"), ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"), ({"stream": 1}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "x" * 257}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"),
    ({"return_token_ids": 1}, "return_token_ids"), ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"max_draft_length": -1}, "max_draft_length"), ({"max_draft_length": 1.5}, "max_draft_length"),
    ({"model": 5}, "model"),
    ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"), ({"repetition_penalty": 1e9}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"), ({"logit_bias": {"320": 1}}, "logit_bias"), ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"bad_words": "the"}, "bad_words"), ({"bad_words": [""]}, "bad_words.0"), ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words.0"),
    ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"min_tokens": 10**40}, "min_tokens"),
    ({"n": 0}, "n"), ({"n": 65}, "n"), ({"n": 10**9}, "n"), ({"n": True}, "n"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("given", "param"), BAD_BOTH)
async def test_bad_options(site: Site, path: str, given: dict[str, Any], param: str) -> None:
    answer = await site.post(path, {"prompt": "x", "messages": MESSAGES, **given})
    assert_refused(site, answer.status, answer.json(), param)


async def test_options_of_one_endpoint(site: Site) -> None:
    """`logprobs` is a number for completions and a switch for chat, which counts with `top_logprobs`."""
    for path, given, param in (
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"prompt": ["x"] * 33, "n": 2}, "n"),
    ):
        answer = await site.post(path, {"prompt": "x", "messages": MESSAGES, **given})
        assert_refused(site, answer.status, answer.json(), param)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"), ([], "prompt"), ([""], "prompt"), (["a", ""], "prompt"), ([[]], "prompt"), ([[5], []], "prompt"), (None, "prompt"),
    (5, "prompt"), ({"text": "x"}, "prompt"), (["a", 1], "prompt.1"), ([1, "a"], "prompt.1"), ([[1], "a"], "prompt.1"),
    ([True], "prompt.0"), ([1.5], "prompt.0"), ([-1], "prompt.0"), ([320], "prompt"), ([[5], [10**30]], "prompt.1.0"),
    ([[[1]]], "prompt.0.0"), ([None], "prompt.0"),
    (["x"] * 65, "prompt"), ([[5]] * 65, "prompt"), ([5] * 128, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
async def test_bad_prompts(site: Site, prompt: Any, param: str) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": prompt})
    assert_refused(site, answer.status, answer.json(), param)


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"), (None, "messages"), ("hi", "messages"), ({}, "messages"), (["hi"], "messages.0"), ([{}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"), ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"), ([{"role": "boss", "content": "x"}], "messages.0.role"),
    ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages.0.tool_call_id"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ([*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages.1.tool_calls.0.function"),
    ([{"role": "user", "content": "x", "name": 5}], "messages.0.name"),
    ([{"role": "user", "content": "x"}] * 4097, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
async def test_bad_messages(site: Site, messages: Any, param: str) -> None:
    answer = await site.post(CHAT, {"messages": messages})
    assert_refused(site, answer.status, answer.json(), param)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {}, "prompt: the field is missing"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: the field is missing"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "'boss'; other values are not supported by this version"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p: Expected `float` > 0"),
        (COMPLETIONS, [], "the body must be a JSON object: Expected `object`, got `array`"),
        (COMPLETIONS, {"prompt": [[5]] * 65}, "65 prompts, limit 64"),
    ],
)
async def test_a_refusal_says_what_is_wrong(site: Site, path: str, body: Any, words: str) -> None:
    answer = await site.post(path, body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]


def assert_refused(site: Site, status: int, body: Any, param: str) -> None:
    assert status == 400, body
    error = body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert not site.engine.requests
