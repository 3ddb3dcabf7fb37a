"""`return_token_ids` and `cache_salt`: tokens beside the text, and prefixes that are shared within one salt only."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.request import Request
from tests.fakes.asgi import Answer
from tests.fakes.fake_engine import FakeEngine
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
TOKENS = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 2)


def says(_: Request) -> tuple[int, ...]:
    return TOKENS


def streamed_ids(answer: Answer, index: int = 0) -> list[list[int]]:
    choices = [choice for event in answer.events() if event != "[DONE]" for choice in event["choices"] if choice["index"] == index]
    return [choice["token_ids"] for choice in choices if choice.get("token_ids")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_has_the_tokens_of_each_step_in_its_chunk(make_site: Callable[..., Site], path: str) -> None:
    site = make_site(FakeEngine(answer=says, chunk=4))
    body = {"prompt": [5, 6], "messages": MESSAGES, "max_tokens": 20, "stream": True}
    answer = await site.post(path, {**body, "return_token_ids": True})
    assert streamed_ids(answer) == [[5], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 2]], "the prompt's token, then step by step"
    prompt_ids = list(site.engine.requests[0].prompt_token_ids)
    first = answer.events()[0]
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt_ids
    assert answer.body.count(b"prompt_token_ids") == 1
    plain = await site.post(path, body)
    assert b"token_ids" not in plain.body
    assert text_of(plain) == text_of(answer)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_body_has_the_tokens_of_each_choice(make_site: Callable[..., Site], path: str) -> None:
    site = make_site(FakeEngine(answer=says, chunk=3))
    body = {"prompt": [5, 6], "messages": MESSAGES, "max_tokens": 20, "n": 2}
    told = (await site.post(path, {**body, "return_token_ids": True})).json()
    assert [choice["token_ids"] for choice in told["choices"]] == [list(TOKENS)] * 2
    prompt_ids = list(site.engine.requests[0].prompt_token_ids)
    if path == CHAT:
        assert told["prompt_token_ids"] == prompt_ids
    else:
        assert [choice["prompt_token_ids"] for choice in told["choices"]] == [prompt_ids] * 2
    for off in ({}, {"return_token_ids": False}):
        assert b"token_ids" not in (await site.post(path, {**body, **off})).body


async def test_each_prompt_of_a_completion_is_told_with_its_choice(make_site: Callable[..., Site]) -> None:
    site = make_site(FakeEngine(chunk=2))
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 10, "return_token_ids": True}
    choices = (await site.post(COMPLETIONS, body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], [8, 9]]
    assert [choice["token_ids"] for choice in choices] == [[5, 6, 7, 2], [8, 9, 2]]
    stream = await site.post(COMPLETIONS, {**body, "stream": True})
    assert [joined(streamed_ids(stream, index)) for index in (0, 1)] == [[5, 6, 7, 2], [8, 9, 2]]


@pytest.mark.parametrize("chunk", [1, 3, 8])
async def test_tokens_text_and_count_end_together_at_a_stop_string(make_site: Callable[..., Site], chunk: int) -> None:
    site = make_site(FakeEngine(answer=says, chunk=chunk))
    text = (await site.post(COMPLETIONS, {"prompt": [5], "max_tokens": 20})).json()["choices"][0]["text"]
    body = {"prompt": [5], "max_tokens": 20, "stop": text[4], "return_token_ids": True}
    told = (await site.post(COMPLETIONS, body)).json()
    choice, num_tokens = told["choices"][0], told["usage"]["completion_tokens"]
    assert num_tokens < len(TOKENS)
    assert choice["token_ids"] == list(TOKENS[:num_tokens])
    stream = await site.post(COMPLETIONS, {**body, "stream": True})
    assert joined(streamed_ids(stream)) == list(TOKENS[:num_tokens])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_routes_without_it_refuse(site: Site, path: str) -> None:
    body = {"input": "hello", "messages": MESSAGES, "max_tokens": 5}
    body = {**body, **({} if path == "/v1/messages" else {"max_tokens": None, "messages": None})}
    assert (await site.post(path, {**body, "return_token_ids": True})).status == 400
    assert (await site.post(path, {**body, "return_token_ids": False})).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5, 6]}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ],
)
async def test_the_salt_reaches_the_prefix_cache(site: Site, path: str, body: dict[str, Any]) -> None:
    await site.post(path, {**body, "cache_salt": "x" * 256})
    await site.post(path, body)
    assert [request.cache_salt for request in site.engine.requests] == ["x" * 256, ""]


def text_of(answer: Answer) -> str:
    choices = [choice for event in answer.events() if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def joined(parts: list[list[int]]) -> list[int]:
    return [token_id for part in parts for token_id in part]
