"""Responses without a client: they run on, can be asked for and cancelled, hold their place and their clock, and end with the server."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, ServerConfig
from paceline.server.run import bind_socket, run_server
from tests.fakes.fake_engine import FakeEngine, Faults
from tests.fakes.openai_types import check_response
from tests.unit.server.conftest import Site

PATH = "/v1/responses"
BODY = {"input": "hi", "background": True, "max_output_tokens": 50}
HANGS = Faults(hang_after=2)
Speak = Callable[..., Site]


async def begin(site: Site, **options: Any) -> str:
    """Start one; its path."""
    answer = await site.post(PATH, {**BODY, **options})
    assert answer.status == 200, answer.body
    body = answer.json()
    check_response(body)
    assert (body["status"], body["background"], body["output"], body["store"]) == ("queued", True, [], True)
    return f"{PATH}/{body['id']}"


async def has_begun(site: Site, path: str) -> None:
    """Wait until its first token is there."""
    for _ in range(500):
        if (status := (await site.get(path)).json()["status"]) != "queued":
            assert status == "in_progress"
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not begin")


async def ended(site: Site, path: str) -> dict[str, Any]:
    """What it has become when it has ended."""
    for _ in range(500):
        body = (await site.get(path)).json()
        if body["status"] not in ("queued", "in_progress"):
            check_response(body)
            return body
        await asyncio.sleep(0.005)
    raise AssertionError("it did not end")


def is_idle(site: Site) -> bool:
    """Nothing of any request is left, and no task."""
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks() if task is not asyncio.current_task()]  # type: ignore[union-attr]
    limits = site.server._stats.limits
    return not (site.engine.num_active or len(site.in_flight) or limits.num_requests or any("Response" in name for name in names))


async def test_it_runs_on_without_a_client(speak: Speak) -> None:
    site = speak(faults=Faults(step_s=0.05))
    path = await begin(site)
    await has_begun(site, path)
    body = await ended(site, path)
    assert body["status"] == "completed"
    assert body["output"][0]["content"][0]["text"] == "the quick brown fox"
    assert body["usage"]["output_tokens"] > 4
    assert "metrics" in body
    assert is_idle(site)
    follow = await site.post(PATH, {"input": "and?", "previous_response_id": body["id"]})
    assert follow.status == 200


async def test_cancel_ends_it_in_the_engine_at_once(speak: Speak) -> None:
    site = speak(faults=HANGS)
    path = await begin(site)
    await has_begun(site, path)
    answer = await site.post(f"{path}/cancel", b"")
    assert site.engine.aborted == [site.engine.requests[0].request_id], "before the answer to the cancellation is out"
    assert answer.status == 200
    body = answer.json()
    check_response(body)
    assert (body["status"], body["output"][0]["status"]) == ("cancelled", "incomplete")
    assert 1 <= body["usage"]["output_tokens"] <= 2
    assert is_idle(site)
    assert site.server.metrics.finished_by_reason["abort"] == 1
    assert sum(site.server.metrics.errors.values()) == 0
    again = await site.post(f"{path}/cancel")
    assert (again.status, again.json()) == (200, body)
    assert (await site.get(path)).json() == body


async def test_two_cancellations_at_once(speak: Speak) -> None:
    site = speak(faults=HANGS)
    path = await begin(site)
    await site.engine.started.wait()
    first, second = await asyncio.gather(site.post(f"{path}/cancel"), site.post(f"{path}/cancel"))
    assert (first.status, second.status) == (200, 200)
    assert first.json() == second.json()


async def test_what_has_ended_cannot_be_cancelled(speak: Speak) -> None:
    site = speak()
    path = await begin(site)
    await ended(site, path)
    answer = await site.post(f"{path}/cancel")
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "completed" in answer.json()["error"]["message"]
    assert (await site.get(path)).json()["status"] == "completed"


async def test_only_background_responses_can_be_cancelled(speak: Speak) -> None:
    site = speak()
    body = (await site.post(PATH, {"input": "hi"})).json()
    answer = await site.post(f"{PATH}/{body['id']}/cancel")
    assert answer.status == 400
    assert "background" in answer.json()["error"]["message"]


async def test_deleting_ends_it(speak: Speak) -> None:
    site = speak(faults=HANGS)
    path = await begin(site)
    await site.engine.started.wait()
    assert (await site.post(path, method="DELETE")).status == 200
    assert len(site.engine.aborted) == 1
    assert is_idle(site)
    assert (await site.get(path)).status == 404


async def test_it_holds_a_place_until_its_end(speak: Speak) -> None:
    site = speak(faults=HANGS, config=ServerConfig(EngineConfig(seed=7), max_concurrent_requests=1))
    path = await begin(site)
    await site.engine.started.wait()
    for refused_path, body in ((PATH, BODY), ("/v1/completions", {"prompt": "x"})):
        refused = await site.post(refused_path, body)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "busy")
    assert (await site.get(path)).status == 200
    assert (await site.post(f"{path}/cancel")).status == 200, "a full server above all takes what frees a place"
    site.engine.faults = Faults()
    assert (await site.post("/v1/completions", {"prompt": "x"})).status == 200
    assert (await ended(site, await begin(site)))["status"] == "completed"
    assert is_idle(site)


async def test_its_time_limit_is_the_requests(speak: Speak) -> None:
    site = speak(faults=HANGS, config=ServerConfig(EngineConfig(seed=7), request_timeout=0.5))
    body = await ended(site, await begin(site))
    assert body["status"] == "failed"
    assert "--request-timeout" in body["error"]["message"]
    assert body["usage"]["output_tokens"] == 2
    assert is_idle(site)
    assert site.server.metrics.finished_by_reason["timeout"] == 1
    assert site.server.metrics.errors["timeout"] == 1


async def test_one_that_ended_in_time_is_left_alone(speak: Speak) -> None:
    site = speak(config=ServerConfig(EngineConfig(seed=7), request_timeout=0.5))
    path = await begin(site)
    await ended(site, path)
    await asyncio.sleep(0.6)
    assert (await site.get(path)).json()["status"] == "completed"


@pytest.mark.parametrize(("faults", "code"), [(Faults(fail_after=2), "engine_failed"), (Faults(die_after=2), "engine_dead")])
async def test_an_engine_that_fails(speak: Speak, faults: Faults, code: str) -> None:
    site = speak(faults=faults)
    body = await ended(site, await begin(site))
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    assert site.server.metrics.errors[code] == 1
    assert is_idle(site)


async def test_shut_down_leaves_no_task(speak: Speak) -> None:
    site = speak(faults=HANGS)
    paths = [await begin(site) for _ in range(3)]
    await asyncio.wait_for(site.in_flight.end_background(), 5)
    assert is_idle(site)
    for path in paths:
        body = (await site.get(path)).json()
        assert body["status"] == "failed"
        assert "shutting down" in body["error"]["message"]
    site.in_flight.is_draining = True
    assert (await site.post(PATH, BODY)).json()["error"]["code"] == "shutting_down"


async def test_answers_with_a_client_outlive_the_end_of_the_others(speak: Speak) -> None:
    site = speak(faults=HANGS)
    connection = site.open(PATH, {"input": "hi", "stream": True})
    await connection.num_chunks(1)
    await asyncio.wait_for(site.in_flight.end_background(), 5)
    assert not connection.task.done()
    await connection.leave()


async def test_a_server_that_stops_ends_it_first(folder: Path) -> None:
    """Over a socket: it does not use up the time that answers with a client get, and when the server has stopped nothing is left."""
    engine = FakeEngine(answer=lambda _: [5] * 100, faults=HANGS)
    listener, ready = bind_socket("127.0.0.1", 0), asyncio.Event()
    config = ServerConfig(warmup=False, shutdown_timeout=60)
    serving = asyncio.create_task(run_server(engine, config, folder, listener, lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    body = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
    await asyncio.wait_for(engine.started.wait(), 10)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 10)
    assert engine.num_active == 0
    assert len(engine.aborted) == 1
    writer.close()


async def test_a_full_store_refuses_what_must_be_stored(speak: Speak) -> None:
    site = speak(faults=HANGS, config=ServerConfig(EngineConfig(seed=7), responses_memory_bytes=6000))
    path = await begin(site)
    for options in ({"background": True}, {"store": True}):
        refused = await site.post(PATH, {"input": "hi", "max_output_tokens": 50, **options})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "store_full")
        assert "--responses-memory-bytes" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
    assert len(site.engine.requests) == 1
    site.engine.faults = Faults()
    unstored = await site.post(PATH, {"input": "hi", "max_output_tokens": 50})
    assert (unstored.status, unstored.json()["store"]) == (200, False), "nobody asked for it to be stored"
    await site.post(f"{path}/cancel")
    assert (await site.post(PATH, {"input": "hi", "max_output_tokens": 50, "store": True})).status == 200


async def test_a_server_that_stores_nothing(speak: Speak) -> None:
    site = speak(config=ServerConfig(EngineConfig(seed=7), responses_memory_bytes=0))
    assert (await site.post(PATH, {"input": "hi"})).json()["store"] is False
    for options in ({"background": True}, {"store": True}):
        refused = await site.post(PATH, {"input": "hi", **options})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "store")
        assert "--responses-memory-bytes" in refused.json()["error"]["message"]


async def test_the_store_keeps_to_its_bound(speak: Speak) -> None:
    limit = 20_000
    site = speak(config=ServerConfig(EngineConfig(seed=7), responses_memory_bytes=limit))
    store = site.server._responses._store
    ids = []
    for index in range(20):
        body = (await site.post(PATH, {"input": "x" * 100 * (index % 5 + 1), "max_output_tokens": 50})).json()
        ids.append(body["id"])
        assert 0 < store.num_bytes <= limit
    there = [(await site.get(f"{PATH}/{response_id}")).status == 200 for response_id in ids]
    assert there == sorted(there), "the oldest are gone, the newest are there"
    assert 2 < sum(there) < 10
    assert len(store) == sum(there)
