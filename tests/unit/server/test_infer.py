"""`/infer`: the same text and counts as a completion, in its own shape, and errors that name its own fields."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.fake_engine import FakeEngine, Faults
from tests.unit.server.conftest import Site

TEXT = "the quick brown fox jumps over 日本"
BODY = {"prompt": "the fox", "max_length": 60}


@pytest.fixture
def speak(make_site: Callable[..., Site], tokenizer: Tokenizer) -> Callable[..., Site]:
    token_ids = tokenizer.encode(TEXT).ids

    def make(faults: Faults | None = None) -> Site:
        return make_site(FakeEngine(answer=lambda _: [*token_ids, 2], chunk=3, faults=faults or Faults()))

    return make


async def test_an_answer(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    site = speak(Faults(step_s=0.002))
    answer = await site.post("/infer", BODY)
    assert answer.status == 200
    body = answer.json()
    assert list(body) == ["text", "tokens", "latency_ms", "first_token_ms", "accepted_length", "finish_reason"]
    assert (body["text"], body["tokens"], body["finish_reason"]) == (TEXT, len(tokenizer.encode(TEXT).ids) + 1, "stop")
    assert 0 < body["first_token_ms"] < body["latency_ms"] < 5000
    completion = (await site.post("/v1/completions", {"prompt": "the fox", "max_tokens": 60})).json()
    assert body["accepted_length"] == completion["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1
    first, second = site.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling.max_tokens == 60


async def test_a_stream_is_pieces_and_then_the_answer(speak: Callable[..., Site]) -> None:
    answer = await speak().post("/infer", {**BODY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last, done = answer.events()
    assert done == "[DONE]"
    assert len(pieces) > 3
    assert all(list(piece) == ["text"] and piece["text"] for piece in pieces)
    assert "".join(piece["text"] for piece in pieces) == last["text"] == TEXT
    assert list(last) == ["text", "tokens", "latency_ms", "first_token_ms", "accepted_length", "finish_reason"]


async def test_max_length_and_temperature_reach_the_engine(speak: Callable[..., Site]) -> None:
    site = speak()
    body = (await site.post("/infer", {"prompt": "x", "max_length": 4, "temperature": 0.25})).json()
    assert (body["tokens"], body["finish_reason"]) == (4, "length")
    assert (site.engine.requests[0].sampling.max_tokens, site.engine.requests[0].sampling.temperature) == (4, 0.25)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_length": None}, "max_length", "Expected `int`"),
        ({"max_length": 0}, "max_length", ">= 1"),
        ({"max_length": 200}, "max_length", "max_length is 200, limit 128 together"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": [5]}, "prompt", "Expected `str`"),
        ({"prompt": "x" * 9000}, "prompt", "9,000 characters"),
        ({"top_p": 0.5}, "top_p", "no such field here; leave it out"),
    ],
)
async def test_errors(site: Site, change: dict[str, Any], param: str, words: str) -> None:
    answer = await site.post("/infer", {**BODY, **change})
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not site.engine.requests


async def test_a_missing_field_is_named(site: Site) -> None:
    answer = await site.post("/infer", {"prompt": "x"})
    assert answer.status == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["message"]) == ("max_length", "max_length: the field is missing")


async def test_a_server_that_stops_or_whose_engine_died_says_so(site: Site) -> None:
    site.in_flight.is_draining = True
    answer = await site.post("/infer", BODY)
    assert (answer.status, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "shutting_down", "1")
    site.in_flight.is_draining = False
    site.engine.kill()
    answer = await site.post("/infer", BODY)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_dead")


async def test_the_engines_death_ends_a_stream_with_an_error_event(speak: Callable[..., Site]) -> None:
    answer = await speak(Faults(die_after=3)).post("/infer", {**BODY, "stream": True})
    assert answer.events()[-1]["error"]["code"] == "engine_dead"
    assert "[DONE]" not in answer.events()


async def test_a_client_that_leaves_ends_its_generation(speak: Callable[..., Site]) -> None:
    site = speak(Faults(hang_after=3))
    connection = site.open("/infer", {**BODY, "stream": True})
    await connection.num_chunks(2)
    await connection.leave()
    await asyncio.sleep(0)
    assert site.engine.aborted == [site.engine.requests[0].request_id]
