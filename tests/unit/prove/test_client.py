"""One request against a server that does everything wrong that servers and networks do: always an answer, never an exception."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline.errors import BadInputError, MissingError
from paceline.prove import client as client_module
from paceline.prove.client import Answer, Ask, ChatClient
from tests.fakes.mock_openai import MODEL, Behaviour, MockOpenAi

ASK = Ask(MODEL, [{"role": "user", "content": "say something"}], 30, stream_options={"continuous_usage_stats": True})


async def answer_to(behaviour: Behaviour, ask: Ask = ASK, timeout_s: float = 20.0) -> Answer:
    async with MockOpenAi(behaviour) as server, ChatClient(server.url + "/v1/", timeout_s=timeout_s) as client:
        return await client.complete(ask)


async def faulty(fault: str, timeout_s: float = 20.0) -> Answer:
    return await answer_to(Behaviour(faults={"something": fault}), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def whole() -> Answer:
    return asyncio.run(answer_to(Behaviour()))


def test_a_whole_answer(whole: Answer) -> None:
    assert (whole.error, whole.status, whole.finish_reason) == (None, 200, "length")
    assert whole.num_output_tokens == 30 == len(whole.text.split()) == sum(whole.chunk_tokens)
    assert len(whole.chunk_times_s) == len(whole.chunk_tokens)
    assert whole.sent_s < whole.chunk_times_s[0] <= whole.chunk_times_s[-1] <= whole.end_s
    assert list(whole.chunk_times_s) == sorted(whole.chunk_times_s)
    assert whole.chunk_tokens[0] == 1, "the prompt's token comes alone"
    assert max(whole.chunk_tokens) > 1
    assert whole.acceptance is not None
    assert whole.acceptance.num_spec_steps == len(whole.chunk_tokens) - 1
    assert sum(whole.chunk_tokens[1:]) == whole.acceptance.num_accepted_draft_tokens + whole.acceptance.num_spec_steps


@pytest.mark.parametrize("fault", ["coalesced", "split", "no_done"])
async def test_how_a_stream_is_cut_and_ended_changes_nothing(fault: str, whole: Answer) -> None:
    answer = await faulty(fault)
    times = {"sent_s": 0.0, "end_s": 0.0, "chunk_times_s": ()}
    assert replace(answer, **times) == replace(whole, **times)


@pytest.mark.parametrize(
    ("fault", "status", "error"),
    [
        ("cut", 200, "cut"),
        ("short", 200, "without a finish reason"),
        ("error_event", 200, "error event: step 17 went wrong"),
        ("bad_finish", 200, "finish reason 'tool_calls'"),
        ("no_usage", 200, "without usage"),
        ("http_500", 500, "HTTP 500: the engine is on fire"),
        ("no_stream", 200, "no stream of events"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(fault: str, status: int, error: str) -> None:
    answer = await faulty(fault)
    assert answer.error is not None
    assert error in answer.error
    assert answer.status == status
    if status == 200 and fault != "no_stream":
        assert answer.chunk_times_s, "what came is kept"


async def test_a_time_limit_ends_a_request() -> None:
    answer = await faulty("hang", timeout_s=0.3)
    assert answer.error == "no whole answer within 0.3 s"
    assert answer.chunk_times_s == ()


async def test_a_wrong_account_of_drafts_is_not_believed_and_the_rest_is(whole: Answer) -> None:
    answer = await faulty("wrong_counter")
    assert (answer.acceptance, answer.error, answer.text) == (None, None, whole.text)
    assert answer.acceptance_fault is not None


async def test_where_counts_per_chunk_come_from(whole: Answer) -> None:
    """Usage in each chunk, else token ids, else nowhere: then they are unknown, and the total still is what usage says."""
    by_ids = await answer_to(Behaviour(has_chunk_usage=False), replace(ASK, fields={"return_token_ids": True}))
    assert by_ids.chunk_tokens == whole.chunk_tokens
    assert len(by_ids.token_ids) == 30
    unknown = await answer_to(Behaviour(has_chunk_usage=False, gives_token_ids=False), replace(ASK, fields={"return_token_ids": True}))
    assert (unknown.chunk_tokens, unknown.token_ids, unknown.num_output_tokens) == ((), (), 30)
    assert len(unknown.chunk_times_s) == len(whole.chunk_times_s)


async def test_no_server_is_an_error_record_for_a_request_and_a_remedy_for_the_rest() -> None:
    async with ChatClient("http://127.0.0.1:1") as client:
        answer = await client.complete(ASK)
        assert answer.status == 0
        assert answer.error is not None
        with pytest.raises(MissingError, match=r"paceline serve"):
            await client.get("/v1/models")
    with pytest.raises(BadInputError, match="no URL"):
        ChatClient("localhost:8000")


async def test_the_key_goes_with_every_request_and_nowhere_else() -> None:
    async with MockOpenAi(Behaviour(api_key="secret")) as server:
        async with ChatClient(server.url, "secret") as client:
            assert (await client.get("/v1/models"))[0] == 200
        async with ChatClient(server.url) as client:
            assert (await client.get("/v1/models"))[0] == 401


class Scripted:
    """A server that answers every request with given events."""

    def __init__(self, *events: bytes) -> None:
        async def chat(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"".join(events))
            return response

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        self._server = TestServer(app)

    async def answer(self) -> Answer:
        async with self._server, ChatClient(str(self._server.make_url("/"))) as client:
            return await client.complete(ASK)


def event(delta: dict[str, Any] | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": more.pop("reason", None)}]
    return b"data: " + client_module._encode({"choices": choices, **more}) + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def test_thoughts_count_as_text_and_are_no_part_of_the_history() -> None:
    for field in ("reasoning_content", "reasoning"):
        answer = await Scripted(
            event({"role": "assistant", "content": ""}),
            event({field: "hm "}),
            event({"content": "yes"}),
            event({}, reason="stop", usage=USAGE),
        ).answer()
        assert (answer.text, answer.content, len(answer.chunk_times_s), answer.error) == ("hm yes", "yes", 2, None)


async def test_usage_with_the_last_piece_of_text_is_no_chunk_of_all_tokens() -> None:
    """Servers that count once, at the end: were the total taken for the last chunk's, each time per token would be wrong."""
    answer = await Scripted(event({"content": "a"}), event({"content": "b"}, reason="stop", usage=USAGE)).answer()
    assert (answer.chunk_tokens, len(answer.chunk_times_s), answer.num_output_tokens) == ((), 2, 3)
    single = await Scripted(event({"content": "all at once"}, reason="stop", usage=USAGE)).answer()
    assert (single.chunk_tokens, single.error) == ((3,), None)


async def test_counts_that_do_not_add_up_are_unknown() -> None:
    def usage(number: int) -> dict[str, int]:
        return {"prompt_tokens": 5, "completion_tokens": number}

    answer = await Scripted(
        event({"content": "a"}, usage=usage(1)), event({"content": "b"}, usage=usage(2)), event({}, reason="stop", usage=usage(2)),
        event(None, usage=usage(9)),
    ).answer()  # fmt: skip
    assert (answer.chunk_tokens, answer.num_output_tokens, answer.error) == ((), 9, None)


@pytest.mark.parametrize(
    "payload", [b"data: {oops\n\n", b'data: {"choices": 5}\n\n', b"data: " + b"[" * 100_000 + b"\n\n", b"data: \xff\n\n"]
)
async def test_events_that_cannot_be_read_are_an_error(payload: bytes) -> None:
    answer = await Scripted(event({"content": "a"}), payload).answer()
    assert answer.error is not None
    assert "cannot be read" in answer.error


async def test_what_a_server_may_send_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_STREAM_BYTES", 1000)
    answer = await Scripted(*[event({"content": "a"})] * 50).answer()
    assert answer.error == "the stream is longer than 1,000 bytes"
