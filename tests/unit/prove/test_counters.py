"""Prometheus' text as the few numbers that matter, and the wait for late ones."""

import asyncio
import time

import pytest

from paceline.prove.client import ChatClient
from paceline.prove.counters import NUM_ACCEPTED_PER_POSITION, NUM_DRAFTS, Meter, Scrape, Watch, parse
from tests.fakes.mock_openai import Behaviour, MockOpenAi

TEXT = """\
# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="a b}",engine="0"} 12.0
vllm:spec_decode_num_drafts_total{model_name="m",engine="1"} 3 1700000000
vllm:spec_decode_num_drafts_created{model_name="m",engine="0"} 1.7e+09
vllm:spec_decode_num_drafts 99
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5
vllm:generation_tokens_total 1e3
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 4
vllm:spec_decode_num_draft_tokens_total NaN
vllm:spec_decode_num_accepted_tokens_total wat
garbage
"""


def test_only_counters_by_their_names_summed_over_label_sets() -> None:
    assert parse(TEXT) == Scrape(
        {
            NUM_DRAFTS: 15.0,
            f'{NUM_ACCEPTED_PER_POSITION}{{position="0"}}': 7.0,
            f'{NUM_ACCEPTED_PER_POSITION}{{position="1"}}': 5.0,
            "vllm:generation_tokens_total": 1000.0,
        },
        num_busy=3,
    )
    assert parse("") == parse("<html>no metrics here</html>") == Scrape()


def test_use_of_the_device_is_a_mean_over_gpus_and_nonsense_is_none() -> None:
    text = """\
# TYPE gpu_utilization_percent gauge
gpu_utilization_percent{gpu="0"} 90
gpu_utilization_percent{gpu="1"} 70
gpu_utilization_percent{gpu="2"} 1e9
gpu_utilization_percent{gpu="3"} -1
paceline_memory_bandwidth_fraction 0.5
"""
    assert parse(text) == Scrape(gauges={"gpu_utilization_percent": 80.0, "paceline_memory_bandwidth_fraction": 0.5})


async def test_a_gpu_is_looked_at_while_the_run_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and behind it stands what the GPU does when it has nothing to do."""
    monkeypatch.setattr("paceline.prove.counters._WATCH_INTERVAL_S", 0.001)
    async with MockOpenAi(Behaviour(gpu_percents=(90.0, 5.0), bandwidth_fraction=0.4)) as server, ChatClient(server.url) as client:
        meter = Meter(client)
        before = await meter.find()
        assert before.gauges == {"gpu_utilization_percent": 5.0, "paceline_memory_bandwidth_fraction": 0.4}
        async with Watch(meter, before) as watch:
            assert watch.gauges(before) == before.gauges, "too short for a look: what was seen last"
            server._num_running = 1
            while len(watch._seen) < 3:  # noqa: ASYNC110 - it has no event to wait for
                await asyncio.sleep(0.001)
        server._num_running = 0
        assert watch.gauges(await meter.read())["gpu_utilization_percent"] > 50
        assert watch.gauges(await meter.read())["paceline_memory_bandwidth_fraction"] == 0.4


async def test_a_server_without_a_gpu_is_not_asked_in_the_midst() -> None:
    async with MockOpenAi() as server, ChatClient(server.url) as client:
        meter = Meter(client)
        async with Watch(meter, await meter.find()) as watch:
            assert watch._task is None
        assert watch.gauges(await meter.read()) == {}


async def test_counters_that_come_late_are_waited_for_and_those_that_never_come_are_not() -> None:
    async with MockOpenAi() as server, ChatClient(server.url) as client:
        meter = Meter(client)
        before = await meter.find()
        server.counters["generation"] = 40
        assert (await meter.settled(before, 40)).counters["vllm:generation_tokens_total"] == 40
        start_s = time.monotonic()
        await meter.settled(before, 41, timeout_s=0.25)
        assert time.monotonic() - start_s >= 0.25


async def test_a_server_without_counters_is_asked_once() -> None:
    async with MockOpenAi(Behaviour(has_counters=False)) as server, ChatClient(server.url) as client:
        meter = Meter(client)
        assert await meter.find() == Scrape()
        await server._server.close()
        assert await meter.read() == await meter.idle(1.0) == await meter.settled(Scrape(), 5) == Scrape()
