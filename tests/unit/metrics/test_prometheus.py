"""The exposition: names and types of the interface, values from the engine's statistics, what Prometheus's own parser reads."""

import re
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.request import FinishReason
from paceline.core.stats import EngineStats, GuardState, Speedup, SwitchOff
from paceline.metrics.catalog import CATALOG, Kind
from paceline.metrics.prometheus import Snapshot, render
from paceline.metrics.requests import ErrorKind, FinishedRequest, RequestMetrics
from tests.fakes.fake_engine import FACTS as OWN_FACTS

# interface.md, section 4: what exists by now
INTERFACE = {
    "gauge": [
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
        "llm_throughput_requests_per_second", "gpu_utilization_percent", "paceline_speedup_ratio", "paceline_speedup_ratio_low",
        "paceline_speedup_ratio_high", "paceline_draft_length", "paceline_guard_state", "paceline_memory_bandwidth_fraction",
    ],
    "counter": [
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "paceline_errors_total", "paceline_guard_switch_offs_total",
    ],
    "histogram": [
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds", "llm_latency_seconds", "paceline_chunk_gap_seconds",
    ],
    "summary": ["paceline_step_seconds"],
}  # fmt: skip

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_pages=64,
    num_free_pages=16,
    num_steps=50,
    num_prompt_tokens=100,
    num_generation_tokens=200,
    num_preemptions=1,
    num_prefix_query_tokens=90,
    num_prefix_hit_tokens=30,
    num_drafts=40,
    num_draft_tokens=120,
    num_accepted_tokens=70,
    num_accepted_tokens_per_pos=[40, 20, 10],
    propose_s=0.5,
    forward_s=4.0,
    verify_s=0.5,
    step_s=5.5,
    decode_read_rate=5e9,
    speedups=(Speedup("rows=1,context=0-1k", 1.5, 1.375, 1.625, 40), Speedup("rows=2,context=0-1k", 1.25, 1.0, 1.5, 30)),
    guard_state_by_band={
        "rows=1": GuardState.DRAFTING,
        "rows=2": GuardState.MEASURING,
        "rows=3-4": GuardState.PLAIN,
        "rows=5-8": GuardState.TRIAL,
        "rows=9-16": GuardState.INSOLVENT,
    },
    draft_length_by_band={"rows=1": 3.5, "rows=3-4": 0.0},
    num_switch_offs_by_reason={SwitchOff.ACCOUNT.value: 2},
)
FACTS = replace(OWN_FACTS, memory_bandwidth=2e10)


def snapshot(stats: EngineStats = STATS, requests: RequestMetrics | None = None, model_name: str = "m") -> Snapshot:
    return Snapshot(model_name, FACTS, stats, requests or RequestMetrics(), enable_prefix_caching=True)


@pytest.fixture
def text() -> str:
    requests = RequestMetrics()
    requests.first_tokens(0.05)
    requests.next_tokens(0.02, 2)
    requests.finished(FinishedRequest(FinishReason.STOP, 10, 3, 1, 0.2, 0.01, 0.04, 0.15, 0.1))
    requests.error(ErrorKind.ENGINE_DEAD)
    return render(snapshot(requests=requests)).decode()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in INTERFACE.items() for name in names])
def test_every_metric_of_the_interface_has_its_type_line(text: str, kind: str, name: str) -> None:
    """The TYPE line of a counter carries the `_total` suffix."""
    assert f"\n# TYPE {name} {kind}\n" in "\n" + text


def test_the_exposition_is_the_catalogue(text: str) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types == {metric.name: metric.kind.value for metric in CATALOG.values()}
    assert all(name.endswith("_total") == (kind == Kind.COUNTER) for name, kind in types.items())


def test_no_creation_times(text: str) -> None:
    """Tools that sum everything named like a counter would add them up."""
    assert "_created" not in text


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 200.0',
        'vllm:num_preemptions_total{engine="0",model_name="m"} 1.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 90.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0',
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 70.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.06",model_name="m"} 1.0',
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 2.0',
        'vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 0.05',
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 2.0',
        "paceline_chunk_gap_seconds_count 1.0",
        "paceline_chunk_gap_seconds_sum 0.02",
        'paceline_chunk_gap_seconds_bucket{le="0.015"} 0.0',
        'llm_latency_seconds_count{type="speculative"} 1.0',
        'llm_latency_seconds_count{type="baseline"} 0.0',
        'paceline_step_seconds_sum{phase="forward"} 4.0',
        'paceline_step_seconds_count{phase="total"} 50.0',
        'paceline_errors_total{kind="engine_dead"} 1.0',
        'paceline_speedup_ratio{band="rows=1,context=0-1k",kind="step"} 1.5',
        'paceline_speedup_ratio_low{band="rows=1,context=0-1k",kind="step"} 1.375',
        'paceline_speedup_ratio_high{band="rows=1,context=0-1k",kind="step"} 1.625',
        'paceline_speedup_ratio{band="rows=2,context=0-1k",kind="step"} 1.25',
        'paceline_draft_length{band="rows=1"} 3.5',
        'paceline_guard_state{band="rows=1"} 1.0',
        'paceline_guard_state{band="rows=2"} 1.0',
        'paceline_guard_state{band="rows=3-4"} 0.0',
        'paceline_guard_state{band="rows=5-8"} 0.0',
        'paceline_guard_state{band="rows=9-16"} 0.0',
        'paceline_guard_switch_offs_total{reason="account"} 2.0',
        'paceline_guard_switch_offs_total{reason="acceptance"} 0.0',
        "paceline_memory_bandwidth_fraction 0.25",
    ],
)
def test_values(text: str, line: str) -> None:
    assert f"\n{line}\n" in text


def test_cache_configuration_is_told_by_labels(text: str) -> None:
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="16"' in line
    assert 'num_gpu_blocks="64"' in line
    assert line.endswith(" 1.0")


def test_prometheus_reads_it_back(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ttft = families["vllm:time_to_first_token_seconds"]
    buckets = [sample.value for sample in ttft.samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 1
    accepted = families["vllm:spec_decode_num_accepted_tokens"].samples[0].value
    assert accepted <= families["vllm:spec_decode_num_draft_tokens"].samples[0].value


def test_positions_without_an_accepted_token_are_there_from_the_start() -> None:
    text = render(snapshot(EngineStats())).decode()
    assert [f'position="{position}"' in text for position in range(8)] == [True] * 7 + [False]
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0' in text


@pytest.mark.parametrize(
    "name",
    [
        "gpu_utilization_percent", "paceline_speedup_ratio", "paceline_speedup_ratio_low", "paceline_speedup_ratio_high",
        "paceline_draft_length", "paceline_guard_state", "paceline_memory_bandwidth_fraction",
    ],
)  # fmt: skip
def test_what_is_not_known_has_a_type_and_no_sample(name: str) -> None:
    text = render(snapshot(EngineStats())).decode()
    assert f"\n# TYPE {name} gauge\n" in text
    assert not re.search(rf"^{name}[ {{]", text, re.MULTILINE)


def test_a_fraction_of_an_unknown_bandwidth_is_not_told() -> None:
    unknown = replace(snapshot(), facts=replace(FACTS, memory_bandwidth=0.0))
    assert "\npaceline_memory_bandwidth_fraction " not in render(unknown).decode()


def test_hostile_model_names_are_escaped() -> None:
    name = 'a"b\\c\nd%s%'
    families = list(text_string_to_metric_families(render(snapshot(model_name=name)).decode()))
    assert families[0].samples[0].labels["model_name"] == name


def test_a_scrape_is_quick() -> None:
    one = snapshot()
    render(one)
    assert min(_seconds(one) for _ in range(20)) < 0.005


def _seconds(one: Snapshot) -> float:
    began_s = time.process_time()
    render(one)
    return time.process_time() - began_s
