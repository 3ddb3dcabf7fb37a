"""`/stats`: the engine's and the requests' figures as JSON, once or each second, and streams that end when they should."""

import asyncio
import time
from collections.abc import Callable

import pytest

from paceline.config import ServerConfig
from paceline.core.stats import EngineStats
from paceline.server import stats
from tests.fakes.fake_engine import FakeEngine, Faults
from tests.unit.server.conftest import Site


async def test_figures_of_the_engine(site: Site) -> None:
    now_s = time.monotonic()
    site.engine.current_stats = EngineStats(
        time_s=now_s - 0.1,
        last_step_s=now_s - 0.2,
        num_running=3,
        num_waiting=2,
        num_pages=64,
        num_free_pages=16,
        num_drafts=40,
        num_draft_tokens=120,
        num_accepted_tokens=60,
        num_accepted_tokens_per_pos=[40, 20],
        step_s=5.5,
    )
    answer = await site.get("/stats")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert (body["model"], body["is_alive"]) == ("fake", True)
    assert abs(body["time_s"] - time.time()) < 5
    engine = body["engine"]
    assert (engine["num_running"], engine["num_waiting"], engine["num_accepted_tokens_per_pos"], engine["step_s"]) == (3, 2, [40, 20], 5.5)
    assert (engine["kv_cache_usage"], engine["draft_acceptance_rate"], engine["mean_acceptance_length"]) == (0.75, 0.5, 2.5)
    assert 0.1 <= engine["age_s"] < engine["last_step_age_s"] < 5


async def test_before_the_first_step(site: Site) -> None:
    site.engine.current_stats = EngineStats()
    engine = (await site.get("/stats")).json()["engine"]
    assert engine["last_step_age_s"] is None
    assert (engine["kv_cache_usage"], engine["draft_acceptance_rate"], engine["mean_acceptance_length"]) == (0, 0, 1)


async def test_figures_of_the_requests(make_site: Callable[..., Site]) -> None:
    site = make_site(FakeEngine(), ServerConfig(max_concurrent_requests=9))
    await site.post("/v1/completions", {"prompt": [5, 6, 7]})
    await site.post("/v1/completions", {"prompt": ""})
    site.engine.faults = Faults(hang_after=1)
    running = site.open("/v1/completions", {"prompt": [5], "stream": True})
    await running.num_chunks(1)
    requests = (await site.get("/stats")).json()["requests"]
    assert (requests["num_running"], requests["max_concurrent_requests"]) == (1, 9)
    assert (requests["finished"]["stop"], requests["finished"]["timeout"]) == (1, 0)
    assert requests["errors"]["bad_input"] == 1
    assert requests["finished_per_second"] > 0
    first = requests["times"]["vllm:time_to_first_token_seconds"]
    assert first["count"] == 2
    assert first["sum"] > 0
    await running.leave()


async def test_a_dead_engine_is_told(site: Site) -> None:
    site.engine.kill()
    assert (await site.get("/stats")).json()["is_alive"] is False


async def test_a_stream_has_an_event_each_interval(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_INTERVAL_S", 0.05)
    began_s = time.monotonic()
    connection = site.open("/stats?stream=1", method="GET")
    await connection.num_chunks(1)
    await site.post("/v1/completions", {"prompt": [5]})
    await connection.num_chunks(4)
    assert time.monotonic() - began_s >= 3 * 0.05
    first, *_, last = connection.answer.events()
    assert connection.answer.headers["content-type"].startswith("text/event-stream")
    assert (first["requests"]["finished"]["stop"], last["requests"]["finished"]["stop"]) == (0, 1)
    await connection.leave()
    assert site.server._stats.num_streams == 0


async def test_watching_is_no_work(site: Site) -> None:
    """An open stream must not make an idle engine look stalled."""
    connection = site.open("/stats?stream=1", method="GET")
    await connection.num_chunks(1)
    assert site.in_flight.busy_since_s is None
    assert (await site.get("/health")).json()["reason"] == "the engine gave a token"
    await connection.leave()


async def test_a_server_that_stops_ends_its_streams(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_INTERVAL_S", 0.02)
    connection = site.open("/stats?stream=1", method="GET")
    await connection.num_chunks(1)
    site.in_flight.is_draining = True
    await asyncio.wait_for(connection.task, 2)


async def test_streams_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.app.MAX_STREAMS", 2)
    connections = [site.open("/stats?stream=1", method="GET") for _ in range(2)]
    for connection in connections:
        await connection.num_chunks(1)
    answer = await site.get("/stats?stream=1")
    assert (answer.status, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "1", "busy")
    assert "2 streams of statistics are open, the limit; close one" in answer.json()["error"]["message"]
    assert (await site.get("/stats")).status == 200
    await connections[0].leave()
    again = site.open("/stats?stream=1", method="GET")
    await again.num_chunks(1)
    for connection in (again, connections[1]):
        await connection.leave()


@pytest.mark.parametrize("value", ["", "2", "true", "-1"])
async def test_other_values_of_stream_are_refused(site: Site, value: str) -> None:
    answer = await site.get(f"/stats?stream={value}")
    assert answer.status == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["message"]) == ("stream", "stream: must be 0 or 1")
