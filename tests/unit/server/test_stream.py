"""Both kinds of answer: chunks, stops, clients that leave, engines that fail. Nothing ends in silence and nothing keeps running."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.core.outcome import TokenDelta
from paceline.core.request import FinishReason, Request
from tests.fakes.asgi import Answer, Connection
from tests.fakes.fake_engine import FakeEngine, Faults
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "the quick brown fox jumps 😀 over 日本 the lazy dog"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def speak(make_site: Callable[..., Site], tokenizer: Tokenizer) -> Callable[..., Site]:
    """A site whose engine says `text`, `chunk` tokens at a time."""

    def make(text: str = TEXT, chunk: int = 1, faults: Faults | None = None, num_control: int = 0) -> Site:
        token_ids = tokenizer.encode(text).ids
        answer = [*token_ids, 2]
        return make_site(FakeEngine(answer=lambda _: answer, chunk=chunk, faults=faults or Faults(), num_control=num_control))

    return make


def chat_body(**options: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 90, **options}


def text_of(answer: Answer) -> str:
    choices = [event["choices"][0] for event in answer.events() if event != "[DONE]" and event.get("choices")]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@pytest.mark.parametrize("chunk", range(1, 9))
async def test_a_chat_stream(speak: Callable[..., Site], chunk: int) -> None:
    answer = await speak(chunk=chunk).post(CHAT, chat_body(stream=True))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events()
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(answer) == TEXT
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert not any("usage" in event for event in events)
    assert "\ufffd" not in answer.body.decode()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("chunk", [1, 3, 8])
async def test_stream_and_body_say_the_same(speak: Callable[..., Site], path: str, chunk: int) -> None:
    body = chat_body(prompt="x", stop=["laz"])
    whole = (await speak(chunk=chunk).post(path, body)).json()
    stream = await speak(chunk=chunk).post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    assert text_of(stream) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == TEXT[: TEXT.index("laz")]
    last = stream.events()[-2]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["metrics"]["speculative_decoding"] == whole["metrics"]["speculative_decoding"]


async def test_tokens_of_one_step_are_one_chunk(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    answer = await speak(chunk=4).post(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stream": True})
    num_tokens = len(tokenizer.encode(TEXT).ids) + 1
    assert len(answer.chunks) <= 1 + -(-(num_tokens - 1) // 4) + 1


async def test_without_a_stop_nothing_is_held_back(speak: Callable[..., Site]) -> None:
    site = speak("abc", faults=Faults(hang_after=2))
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    await connection.num_chunks(2)
    assert text_of(connection.answer) == "ab"
    await connection.leave()


@pytest.mark.parametrize("stop", ["fox", " 😀", "日", "k brown f", ["zzz", "over", "r 日"], "g", "t"])
async def test_stop_strings_end_text_count_and_work_together(speak: Callable[..., Site], tokenizer: Tokenizer, stop: Any) -> None:
    """At every chunk size: the same text and count; and the engine stops working."""
    stops = [stop] if isinstance(stop, str) else stop
    cut = min(TEXT.index(each) + len(each) for each in stops if each in TEXT)
    expected = next(TEXT[:cut].removesuffix(each) for each in stops if TEXT[:cut].endswith(each))
    token_ids = tokenizer.encode(TEXT).ids
    num_tokens = next(n for n in range(1, len(token_ids) + 1) if len(tokenizer.decode(token_ids[:n]).rstrip("\ufffd")) >= cut)
    for chunk in range(1, 9):
        site = speak(chunk=chunk)
        body = (await site.post(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stop": stop})).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == (expected, "stop", num_tokens), chunk
        assert site.engine.num_active == 0
        assert site.server.metrics.finished_by_reason["stop"] == 1


async def test_a_stop_string_aborts_in_the_engine_before_the_answer_ends(speak: Callable[..., Site]) -> None:
    site = speak()
    connection = site.open(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stop": "quick", "stream": True})
    connection.reading.clear()
    for _ in range(50):
        await asyncio.sleep(0)
    connection.reading.set()
    await connection.task
    assert site.engine.aborted == [site.engine.requests[0].request_id]
    assert text_of(connection.answer) == "the "


async def test_metrics_of_an_answer_that_a_stop_string_ended(speak: Callable[..., Site]) -> None:
    """The engine never sends the last statistics then: they are counted from the deltas."""
    body = (await speak(chunk=3).post(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stop": "fox"})).json()
    metrics, spec = body["metrics"], body["metrics"]["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] > 0
    assert sum(n * count for n, count in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
    assert spec["num_accepted_draft_tokens"] == 2 * spec["num_spec_steps"]
    assert (metrics["queue_ms"], metrics["prefill_ms"]) == (0.5, 2.0)


async def test_metrics_and_usage_of_an_answer(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    body = (await speak(chunk=3).post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 90})).json()
    num_tokens = len(tokenizer.encode(TEXT).ids) + 1
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": num_tokens + 2, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    metrics, spec = body["metrics"], body["metrics"]["speculative_decoding"]
    assert list(metrics) == [
        "speculative_decoding", "num_plain_steps", "num_control_steps", "verification", "lossless", "queue_ms", "prefill_ms", "decode_ms",
    ]  # fmt: skip
    assert list(spec) == [
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "acceptance_histogram_by_draft_length",
        "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
    ]  # fmt: skip
    assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert spec["draft_acceptance_rate"] == spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"]
    assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1 == 8
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    # Every token but the prompt's first one comes from a step: its accepted drafts and one more.
    assert spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] + metrics["num_plain_steps"] == num_tokens - 1
    assert (metrics["verification"], metrics["lossless"], metrics["num_control_steps"]) == ("coupled", True, 0)


@pytest.mark.parametrize("stop", [None, "fox"])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_control_steps_of_an_answer(speak: Callable[..., Site], stop: str | None, num_choices: int) -> None:
    """They are plain steps, too; counted alike whether the engine or a stop string ends the answer."""
    body = {"prompt": "a quick fox and more", "max_tokens": 90, "n": num_choices} | ({"stop": stop} if stop else {})
    metrics = (await speak(chunk=3, num_control=4).post(COMPLETIONS, body)).json()["metrics"]
    assert (metrics["num_control_steps"], metrics["num_plain_steps"]) == (4 * num_choices, 4 * num_choices)
    plain = (await speak(chunk=3, num_control=4).post(COMPLETIONS, body | {"max_draft_length": 0})).json()["metrics"]
    assert plain["num_control_steps"] == 0


async def test_metrics_without_speculation(speak: Callable[..., Site]) -> None:
    body = (await speak().post(COMPLETIONS, {"prompt": [5], "max_tokens": 10, "max_draft_length": 0})).json()
    spec = body["metrics"]["speculative_decoding"]
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"], spec["acceptance_histogram"]) == (1.0, 0.0, [0])
    assert body["metrics"]["num_plain_steps"] == 9


async def test_usage_chunks(speak: Callable[..., Site]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await speak(chunk=2).post(CHAT, chat_body(stream=True, stream_options=options))
    *events, last, _ = answer.events()
    counts = [event["usage"]["completion_tokens"] for event in events if event["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert len(counts) == len(events) - 1  # all but the one that opens the answer


async def test_include_usage_leaves_null_in_the_other_chunks(speak: Callable[..., Site]) -> None:
    answer = await speak().post(CHAT, chat_body(stream=True, stream_options={"include_usage": True}))
    *events, last, _ = answer.events()
    assert all(event["usage"] is None for event in events)
    assert "metrics" in last


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_generation(speak: Callable[..., Site], stream: bool) -> None:
    site = speak(faults=Faults(hang_after=3))
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": stream})
    if stream:
        await connection.num_chunks(3)
    await site.engine.started.wait()
    await connection.leave()
    assert site.engine.aborted == [site.engine.requests[0].request_id]
    assert site.engine.num_active == 0
    assert len(site.in_flight) == 0
    assert site.server.metrics.finished_by_reason["abort"] == 1


async def test_a_client_that_leaves_ends_all_its_prompts(speak: Callable[..., Site]) -> None:
    site = speak(faults=Faults(hang_after=2))
    connection = site.open(COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True})
    await connection.num_chunks(6)
    await connection.leave()
    assert sorted(site.engine.aborted) == sorted(request.request_id for request in site.engine.requests)
    assert site.engine.num_active == 0


async def test_a_client_that_leaves_before_the_first_token(speak: Callable[..., Site]) -> None:
    site = speak(faults=Faults(hang_after=0))
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    await site.engine.started.wait()
    await connection.leave()
    assert len(site.engine.aborted) == 1
    assert connection.answer.status == 0


async def test_a_reader_that_stops_and_leaves_while_the_server_waits_to_send(speak: Callable[..., Site]) -> None:
    site = speak()
    connection = site.open(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stream": True})
    connection.reading.clear()
    await site.engine.started.wait()
    await asyncio.sleep(0.02)
    assert site.engine.num_active == 1, "a slow reader holds its generation up: nothing is buffered without end"
    await connection.leave()
    assert site.engine.num_active == 0
    assert len(site.engine.aborted) == 1


async def test_many_clients_of_which_a_third_leave(speak: Callable[..., Site]) -> None:
    site = speak(chunk=2, faults=Faults(step_s=0.005))
    connections = [site.open(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stream": True}) for _ in range(60)]

    async def leave_after(num_chunks: int, connection: Connection) -> None:
        await connection.num_chunks(num_chunks)
        await connection.leave()

    await asyncio.gather(*(leave_after(1 + index % 5, connection) for index, connection in enumerate(connections) if index % 3 == 0))
    await asyncio.gather(*(connection.task for connection in connections))
    assert site.engine.num_active == 0
    assert len(site.engine.aborted) == 20
    assert [text_of(connection.answer) for index, connection in enumerate(connections) if index % 3] == [TEXT] * 40
    assert len(site.in_flight) == 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_the_engines_death_ends_a_stream_with_an_error_event(speak: Callable[..., Site], prompt: Any) -> None:
    site = speak(faults=Faults(die_after=3))
    answer = await site.post(COMPLETIONS, {"prompt": prompt, "stream": True})
    assert answer.status == 200
    last = answer.events()[-1]
    assert last["error"]["code"] == "engine_dead"
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in answer.events()
    assert site.engine.num_active == 0
    health = await site.get("/health")
    assert health.status == 503
    assert health.json()["reason"] == "the engine has stopped"
    assert site.server.metrics.errors["engine_dead"] == 1


@pytest.mark.parametrize(("stream", "after"), [(False, 3), (False, 0), (True, 0)])
async def test_the_engines_death_before_the_answer_began_is_a_500(speak: Callable[..., Site], stream: bool, after: int) -> None:
    answer = await speak(faults=Faults(die_after=after)).post(COMPLETIONS, {"prompt": "x", "stream": stream})
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "engine_dead"


async def test_a_dead_engine_refuses_at_once(speak: Callable[..., Site]) -> None:
    site = speak()
    site.engine.kill()
    answer = await site.post(CHAT, chat_body())
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_request_is_an_error_and_the_next_one_is_served(speak: Callable[..., Site], stream: bool) -> None:
    site = speak(faults=Faults(fail_after=2))
    answer = await site.post(CHAT, chat_body(stream=stream))
    error = answer.events()[-1]["error"] if stream else answer.json()["error"]
    assert error["code"] == "engine_failed"
    assert (answer.status == 200) == stream
    assert site.server.metrics.finished_by_reason["error"] == 1
    site.engine.faults = Faults()
    assert (await site.post(CHAT, chat_body())).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_cannot_go_on_with_is_its_own_fault(speak: Callable[..., Site], stream: bool) -> None:
    """A grammar that grows beyond its limits, for one."""
    answer = await speak(faults=Faults(fail_after=2, is_refusal=True)).post(CHAT, chat_body(stream=stream))
    error = answer.events()[-1]["error"] if stream else answer.json()["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", "step 17 went wrong")
    assert answer.status == (200 if stream else 400)


@pytest.mark.parametrize("stop", [None, "brown"])
async def test_what_came_in_the_step_of_a_failure_is_said(
    speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, stop: str | None
) -> None:
    """As without drafts, which bring several tokens in a step: a stop string among them has ended the answer before the failure."""
    honest = FakeEngine._deltas

    def failing(engine: FakeEngine, request: Request) -> Iterator[TokenDelta]:
        for delta in honest(engine, request):
            is_last = len(delta.token_ids) > 1
            yield replace(delta, finish_reason=FinishReason.ERROR, error="it left", is_refusal=True) if is_last else delta

    text = "the brown fox"
    monkeypatch.setattr(FakeEngine, "_deltas", failing)
    answer = await speak(text, chunk=40).post(CHAT, chat_body(stream=True, stop=stop))
    last = answer.events()[-1]
    if stop is None:
        assert text_of(answer) == text
        assert last["error"]["message"] == "it left"
    else:
        assert last == "[DONE]"
        assert text_of(answer) == "the "


async def test_an_engine_that_ends_without_a_reason_is_an_error(speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = speak()
    monkeypatch.setattr(FakeEngine, "_deltas", lambda *_: [])
    assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == 500


async def test_shut_down_ends_answers_with_an_error(speak: Callable[..., Site]) -> None:
    site = speak(faults=Faults(hang_after=3))
    stream = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    whole = site.open(COMPLETIONS, {"prompt": "x"})
    await stream.num_chunks(3)
    while site.engine.num_active < 2:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.001)
    site.in_flight.interrupt_all()
    await asyncio.gather(stream.task, whole.task)
    assert stream.answer.events()[-1]["error"]["code"] == "shutting_down"
    assert whole.answer.status == 503
    assert whole.answer.headers["retry-after"] == "1"
    assert len(site.engine.aborted) == 2


async def test_a_cancellation_from_elsewhere_passes_through(speak: Callable[..., Site]) -> None:
    site = speak(faults=Faults(hang_after=1))
    connection = site.open(COMPLETIONS, {"prompt": "x", "stream": True})
    await connection.num_chunks(1)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert site.engine.num_active == 0


async def test_latencies_are_observed(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    site = speak(chunk=4, faults=Faults(step_s=0.002))
    await site.post(COMPLETIONS, {"prompt": "x", "max_tokens": 90})
    histograms = site.server.metrics.histograms
    num_tokens = len(tokenizer.encode(TEXT).ids) + 1
    assert histograms["vllm:time_to_first_token_seconds"].totals()[-1] == 1
    assert histograms["vllm:inter_token_latency_seconds"].totals()[-1] == num_tokens - 1
    assert histograms["paceline_chunk_gap_seconds"].count == -(-(num_tokens - 1) // 4)
    assert histograms["vllm:request_generation_tokens"].sum == num_tokens
