"""How many requests at once and for how long: who is refused, what a late one is told, and that nothing of it stays behind."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from tests.fakes.asgi import Answer
from tests.fakes.fake_engine import FakeEngine, Faults
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox jumps"
BODIES: dict[str, Any] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/infer": {"prompt": "x", "max_length": 5},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
TIMEOUT_S = 0.1


def num_requests(site: Site) -> int:
    return site.server._stats.limits.num_requests


@pytest.fixture
def limited(make_site: Callable[..., Site]) -> Callable[..., Site]:
    """A site with place for `number` requests."""

    def make(number: int, faults: Faults | None = None) -> Site:
        return make_site(FakeEngine(faults=faults or Faults()), ServerConfig(EngineConfig(seed=7), max_concurrent_requests=number))

    return make


@pytest.fixture
def timed(make_site: Callable[..., Site], tokenizer: Tokenizer) -> Callable[..., Site]:
    """A site with a time limit whose engine says `text`, and hangs after so many deltas."""

    def make(hang_after: int | None, text: str = TEXT, timeout_s: float = TIMEOUT_S) -> Site:
        token_ids = tokenizer.encode(text).ids
        engine = FakeEngine(answer=lambda _: [*token_ids, 2], faults=Faults(hang_after=hang_after))
        return make_site(engine, ServerConfig(EngineConfig(seed=7), request_timeout=timeout_s))

    return make


def text_of(answer: Answer, index: int = 0) -> str:
    choices = [choice for event in answer.events() if event != "[DONE]" for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def reasons_of(answer: Answer) -> dict[int, str]:
    choices = [choice for event in answer.events() if event != "[DONE]" for choice in event["choices"]]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


@pytest.mark.parametrize("path", BODIES)
async def test_over_the_limit_a_request_is_refused_before_its_body_is_read(limited: Callable[..., Site], path: str) -> None:
    site = limited(2, Faults(hang_after=1))
    running = [site.open(COMPLETIONS, {"prompt": "x", "stream": True}) for _ in range(2)]
    for connection in running:
        await connection.num_chunks(1)
    refused = site.open(path, BODIES[path])
    await asyncio.wait_for(refused.task, 5)
    assert refused.answer.status == 503
    assert refused.answer.headers["retry-after"] == "1"
    error = refused.answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("busy", "server_error", None)
    assert "busy with 2 requests" in error["message"]
    assert "--max-concurrent-requests" in error["message"]
    assert refused._parts, "the body was read"
    assert len(site.engine.requests) == 2
    assert site.server.metrics.errors["busy"] == 1
    for connection in running:
        await connection.leave()
    site.engine.faults = Faults()
    assert (await site.post(path, BODIES[path])).status == 200


async def test_a_full_server_still_answers_who_watches_it(limited: Callable[..., Site]) -> None:
    site = limited(1, Faults(hang_after=1))
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    await connection.num_chunks(1)
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake", "/stats", "/openapi.json"):
        assert (await site.get(path)).status == 200, path
    await connection.leave()


async def test_of_many_at_once_the_limit_is_served(limited: Callable[..., Site]) -> None:
    site = limited(3, Faults(step_s=0.01))
    answers = await asyncio.gather(*(site.post(COMPLETIONS, {"prompt": "the fox"}) for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 17
    assert len(site.engine.requests) == 3
    assert num_requests(site) == 0


async def test_every_ending_gives_its_place_back(limited: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = limited(1)
    for body, status in ((b"nonsense", 400), ({"prompt": "x", "model": "other"}, 404), ({"prompt": "x"}, 200), ({"prompt": ""}, 400)):
        assert (await site.post(COMPLETIONS, body)).status == status
    assert (await site.post(COMPLETIONS, b"{}", headers={"content-length": str(1 << 30)})).status == 413
    half = site.open(COMPLETIONS, b'{"prompt": "x"}', headers={"content-length": "99"})
    half._parts = []
    await asyncio.sleep(0.01)
    assert num_requests(site) == 1
    await half.leave()
    for faults, status in ((Faults(fail_after=0), 500), (Faults(), 200)):
        site.engine.faults = faults
        assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == status
    with monkeypatch.context() as patch:
        patch.setattr(site.server._preparation, "_encode_texts", None)  # an error of our own
        assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == 500
    assert num_requests(site) == 0
    assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == 200


async def test_without_a_limit_all_are_served(site: Site) -> None:
    site.engine.faults = Faults(step_s=0.005)
    answers = await asyncio.gather(*(site.post(COMPLETIONS, {"prompt": "x"}) for _ in range(50)))
    assert {answer.status for answer in answers} == {200}


@pytest.mark.parametrize(("path", "hang_after"), [(COMPLETIONS, 3), (CHAT, 3), (COMPLETIONS, 1)])
async def test_a_late_stream_ends_in_good_order(timed: Callable[..., Site], tokenizer: Tokenizer, path: str, hang_after: int) -> None:
    site = timed(hang_after)
    body = {**BODIES[path], "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    answer = await site.post(path, body)
    assert answer.status == 200
    *_, last, usage, done = answer.events()
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "timeout"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == hang_after
    assert usage["metrics"]["num_plain_steps"] + usage["metrics"]["speculative_decoding"]["num_spec_steps"] == hang_after - 1
    assert text_of(answer) == tokenizer.decode(tokenizer.encode(TEXT).ids[:hang_after])
    assert site.engine.aborted == [site.engine.requests[0].request_id]
    assert site.engine.num_active == len(site.in_flight) == num_requests(site) == 0
    assert site.server.metrics.finished_by_reason["timeout"] == 1
    assert sum(site.server.metrics.errors.values()) == 0
    site.engine.faults = Faults()
    assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == 200


async def test_a_late_stream_says_what_it_held_back_for_a_stop_string(timed: Callable[..., Site], tokenizer: Tokenizer) -> None:
    site = timed(3)
    text = tokenizer.decode(tokenizer.encode(TEXT).ids[:3])
    answer = await site.post(COMPLETIONS, {"prompt": "x", "stream": True, "stop": text + "zzz"})
    assert text_of(answer) == text
    assert reasons_of(answer) == {0: "timeout"}


async def test_of_several_prompts_only_the_late_ones_end_so(make_site: Callable[..., Site], tokenizer: Tokenizer) -> None:
    site = make_site(FakeEngine(faults=Faults(hang_after=3)), ServerConfig(EngineConfig(seed=7), request_timeout=TIMEOUT_S))
    options = {"include_usage": True}
    answer = await site.post(COMPLETIONS, {"prompt": [[5], [5, 6, 7, 8]], "stream": True, "stream_options": options})
    assert reasons_of(answer) == {0: "stop", 1: "timeout"}
    assert text_of(answer, 1) == tokenizer.decode([5, 6, 7])
    assert answer.events()[-2]["usage"]["completion_tokens"] == 2 + 3
    assert site.engine.aborted == [site.engine.requests[1].request_id]
    assert (site.server.metrics.finished_by_reason["stop"], site.server.metrics.finished_by_reason["timeout"]) == (1, 1)


@pytest.mark.parametrize("prompt", [[5], [[5], [6], [7]]])
async def test_a_reader_that_pauses_misses_nothing(make_site: Callable[..., Site], prompt: Any) -> None:
    """Work ends on time although the client does not read; what it gets afterwards is all that was counted."""
    engine = FakeEngine(answer=lambda _: [5 + index % 20 for index in range(100)], faults=Faults(step_s=0.002))  # a letter each
    site = make_site(engine, ServerConfig(EngineConfig(seed=7), request_timeout=TIMEOUT_S))
    body = {"prompt": prompt, "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    connection = site.open(COMPLETIONS, body)
    await connection.num_chunks(2)
    connection.reading.clear()
    await asyncio.sleep(3 * TIMEOUT_S)
    assert site.engine.num_active == 0
    assert not connection.task.done()
    connection.reading.set()
    await asyncio.wait_for(connection.task, 5)
    indexes = range(len(site.engine.requests))
    assert reasons_of(connection.answer) == dict.fromkeys(indexes, "timeout")
    texts = [text_of(connection.answer, index) for index in indexes]
    letters = "".join(chr(ord("#") + index % 20) for index in range(100))
    assert all(letters.startswith(text) for text in texts)
    assert connection.answer.events()[-2]["usage"]["completion_tokens"] == sum(map(len, texts)) > 2
    assert len(site.engine.aborted) == len(indexes)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/infer"])
@pytest.mark.parametrize(("stream", "hang_after"), [(False, 3), (False, 0), (True, 0)])
async def test_what_is_late_and_has_not_begun_is_a_504(timed: Callable[..., Site], path: str, stream: bool, hang_after: int) -> None:
    site = timed(hang_after)
    answer = await site.post(path, {**BODIES[path], "stream": stream})
    assert answer.status == 504
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "server_error")
    assert "not finished within 0.1 s" in error["message"]
    assert "--request-timeout" in error["message"]
    assert site.engine.aborted == [site.engine.requests[0].request_id]
    assert site.engine.num_active == len(site.in_flight) == num_requests(site) == 0
    assert site.server.metrics.errors["timeout"] == 1
    assert site.server.metrics.finished_by_reason["timeout"] == 1


async def test_a_late_stream_of_infer(timed: Callable[..., Site], tokenizer: Tokenizer) -> None:
    answer = await timed(3).post("/infer", {"prompt": "x", "max_length": 50, "stream": True})
    *pieces, last, done = answer.events()
    assert done == "[DONE]"
    text = tokenizer.decode(tokenizer.encode(TEXT).ids[:3])
    assert "".join(piece["text"] for piece in pieces) == last["text"] == text
    assert (last["finish_reason"], last["tokens"]) == ("timeout", 3)


async def test_a_body_that_does_not_arrive_is_a_408(timed: Callable[..., Site]) -> None:
    site = timed(None)
    connection = site.open(COMPLETIONS, b'{"prompt": "x"}', headers={"content-length": "99"})
    connection._parts = []
    await asyncio.wait_for(connection.task, 5)
    assert connection.answer.status == 408
    error = connection.answer.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "invalid_request_error")
    assert "body did not arrive within 0.1 s" in error["message"]
    assert "--request-timeout" in error["message"]
    assert connection.answer.headers["x-request-id"]
    assert not site.engine.requests
    assert num_requests(site) == 0


async def test_time_in_the_tokenizer_counts(timed: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = timed(None)
    monkeypatch.setattr(site.server._preparation, "_encode_texts", lambda _: time.sleep(0.3) or [[5]])
    answer = await site.post(COMPLETIONS, {"prompt": "x"})
    assert answer.status == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert site.server.metrics.errors["timeout"] == 1
    assert not site.engine.requests


async def test_a_finished_answer_waits_for_its_reader(timed: Callable[..., Site]) -> None:
    """The engine is done: the time limit is not about the client's reading."""
    site = timed(None)
    connection = site.open(COMPLETIONS, {"prompt": "x", "max_tokens": 50})
    connection.reading.clear()
    await asyncio.sleep(2 * TIMEOUT_S)
    assert site.engine.num_active == 0
    connection.reading.set()
    await asyncio.wait_for(connection.task, 5)
    assert connection.answer.status == 200
    assert connection.answer.json()["choices"][0]["text"] == TEXT


async def test_what_is_on_time_is_left_alone(timed: Callable[..., Site]) -> None:
    site = timed(None, timeout_s=5)
    for stream in (False, True):
        answer = await site.post(COMPLETIONS, {"prompt": "x", "max_tokens": 50, "stream": stream})
        assert answer.status == 200
        assert (text_of(answer) if stream else answer.json()["choices"][0]["text"]) == TEXT
    assert site.server.metrics.finished_by_reason["timeout"] == 0


async def test_a_client_that_leaves_before_its_time_is_up(timed: Callable[..., Site]) -> None:
    site = timed(2)
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    await connection.num_chunks(2)
    await connection.leave()
    await asyncio.sleep(1.5 * TIMEOUT_S)
    assert site.server.metrics.finished_by_reason["abort"] == 1
    assert site.server.metrics.finished_by_reason["timeout"] == 0


async def test_probes_and_streams_of_statistics_have_no_time_limit(timed: Callable[..., Site]) -> None:
    site = timed(None)
    connection = site.open("/stats?stream=1", method="GET")
    await connection.num_chunks(1)
    await asyncio.sleep(2 * TIMEOUT_S)
    assert not connection.task.done()
    await connection.leave()
