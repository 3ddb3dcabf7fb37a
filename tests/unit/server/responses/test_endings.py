"""Responses that end before their time: faults, limits, clients that leave, servers that stop. Each says so, and nothing runs on."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from tests.fakes.fake_engine import Faults
from tests.fakes.openai_types import put_together, read_events
from tests.unit.server.conftest import Site
from tests.unit.server.responses.conftest import CALL, PATH, TOOL, Speak, stream


async def test_a_response_that_failed_or_runs_cannot_be_gone_on_from(speak: Speak) -> None:
    site = speak(faults=Faults(fail_after=2))
    failed = (await stream_until_error(site))["response"]
    refused = await site.post(PATH, {"input": "hi", "previous_response_id": failed["id"]})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "previous_response_id")
    site.engine.faults = Faults(hang_after=2)
    connection = site.open(PATH, {"input": "hi", "stream": True})
    await connection.num_chunks(1)
    running = read_events(connection.answer.body)[0]["response"]
    assert (await site.get(f"{PATH}/{running['id']}")).json()["status"] == "in_progress"
    refused = await site.post(PATH, {"input": "hi", "previous_response_id": running["id"]})
    assert "not ended yet" in refused.json()["error"]["message"]
    await connection.leave()
    assert (await site.get(f"{PATH}/{running['id']}")).json()["status"] == "cancelled"
    assert site.engine.num_active == 0


async def stream_until_error(site: Site) -> dict[str, Any]:
    """The event before the last one, of a stream that breaks."""
    *_, failed, error = await stream(site)
    assert (failed["type"], error["type"]) == ("response.failed", "error")
    return failed


@pytest.mark.parametrize(("faults", "code"), [(Faults(fail_after=3), "engine_failed"), (Faults(die_after=3), "engine_dead")])
async def test_a_broken_stream_says_so(speak: Speak, faults: Faults, code: str) -> None:
    site = speak(faults=faults)
    *_, failed, error = events = await stream(site)
    assert (failed["type"], error["type"]) == ("response.failed", "error")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"] == put_together(events), "what was said is kept"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert (error["code"], error["error"]["code"]) == (code, code)
    assert error["message"] == failed["response"]["error"]["message"]
    assert site.server.metrics.errors[code] == 1
    assert (await site.get(f"{PATH}/{failed['response']['id']}")).json()["status"] == "failed"


async def test_a_call_that_a_fault_cut_off_is_none(think: Speak, tokenizer: Tokenizer) -> None:
    told = '<tool_call>\n{"name": "fox", "arguments": {"over": "d'
    num_tokens = len(tokenizer.encode(told, add_special_tokens=False).ids)
    events = await stream(think(CALL, faults=Faults(fail_after=num_tokens)), tools=[TOOL], max_output_tokens=500)
    assert any(event["type"] == "response.function_call_arguments.delta" for event in events)
    (item,) = events[-2]["response"]["output"]
    assert item["type"] == "message"
    assert CALL.startswith(item["content"][0]["text"])
    assert len(item["content"][0]["text"]) >= len(told) - 2
    assert put_together(events) == [item]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_fails_before_it_began_has_its_own_status(speak: Speak, streamed: bool) -> None:
    answer = await speak(faults=Faults(fail_after=0)).post(PATH, {"input": "hi", "stream": streamed})
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "engine_failed"


async def test_a_client_that_leaves_ends_a_whole_response(speak: Speak) -> None:
    site = speak(faults=Faults(hang_after=2))
    connection = site.open(PATH, {"input": "hi"})
    await site.engine.started.wait()
    (record,) = site.server._responses._store._records.values()
    assert record.end is None
    await connection.leave()
    assert len(site.engine.aborted) == 1
    assert record.end is not None
    assert record.end.status == "cancelled", "so that it can make room for others"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_that_is_cancelled_before_its_first_step_has_ended(
    speak: Speak, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """As by a time limit that is over just then. One that never ended could never make room."""
    create_task = asyncio.create_task

    def cancelled(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = create_task(work)
        if work.__qualname__ == "GenerationResponse._run":
            task.cancel()
        return task

    site = speak()
    connection = site.open(PATH, {"input": "hi", "stream": streamed})
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_task", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await connection.task
    (record,) = site.server._responses._store._records.values()
    assert record.end is not None
    assert record.end.status == "cancelled"
    assert site.server._responses._store._num_running_bytes == 0


async def test_shut_down_breaks_a_stream(speak: Speak) -> None:
    site = speak(faults=Faults(hang_after=3))
    connection = site.open(PATH, {"input": "hi", "stream": True})
    await connection.num_chunks(2)
    site.in_flight.interrupt_all()
    await connection.task
    assert read_events(connection.answer.body)[-1]["code"] == "shutting_down"
    assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_time_limit(speak: Speak, streamed: bool) -> None:
    site = speak(faults=Faults(hang_after=3), config=ServerConfig(EngineConfig(seed=7), request_timeout=0.4))
    answer = await site.post(PATH, {"input": "hi", "stream": streamed})
    assert site.engine.num_active == 0
    assert site.server.metrics.finished_by_reason["timeout"] == 1
    if not streamed:
        assert (answer.status, answer.json()["error"]["code"]) == (504, "timeout")
        return
    last = read_events(answer.body)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "--request-timeout" in last["response"]["error"]["message"]
    assert last["response"]["usage"]["output_tokens"] == 3
