"""Renders the catalogue in Prometheus' text format from the engine's latest statistics and the server's observations.

Called by `server/app.py` for each scrape. No registry and no state: a scrape reads what the owners hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from paceline.core.facts import EngineFacts
from paceline.core.stats import EngineStats
from paceline.metrics.catalog import CATALOG, Kind, Metric
from paceline.metrics.requests import Histogram, RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE = "0"  # vLLM's label for one of several engines behind a server


@dataclass(frozen=True, slots=True)
class Total:
    """A summary: how often and how long in all."""

    count: int
    sum: float


Value = float | Histogram | Total
Samples = Mapping[tuple[str, ...], Value]  # label values in the catalogue's order -> value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one scrape is made of."""

    model_name: str  # as the API serves it
    facts: EngineFacts
    stats: EngineStats
    requests: RequestMetrics
    enable_prefix_caching: bool


def render(snapshot: Snapshot) -> bytes:
    """The exposition, one family for each entry of the catalogue, in its order."""
    return generate_latest(_SnapshotCollector(snapshot))


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        samples = {**_engine_samples(self._snapshot), **_request_samples(self._snapshot.requests)}
        for metric in CATALOG.values():
            yield _family(metric, samples[metric.name], self._snapshot.model_name)


def _engine_samples(snapshot: Snapshot) -> dict[str, Samples]:
    facts, stats = snapshot.facts, snapshot.stats
    cache_labels = (str(facts.page_size), str(facts.num_pages), facts.dtype, str(snapshot.enable_prefix_caching))
    accepted = stats.num_accepted_tokens_per_pos + [0] * (facts.max_draft_length - len(stats.num_accepted_tokens_per_pos))
    phases = {"propose": stats.propose_s, "forward": stats.forward_s, "verify": stats.verify_s, "total": stats.step_s}
    scalars: dict[str, float] = {
        "vllm:num_requests_running": stats.num_running,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:kv_cache_usage_perc": 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0,
        "vllm:prompt_tokens_total": stats.num_prompt_tokens,
        "vllm:generation_tokens_total": stats.num_generation_tokens,
        "vllm:num_preemptions_total": stats.num_preemptions,
        "vllm:prefix_cache_queries_total": stats.num_prefix_query_tokens,
        "vllm:prefix_cache_hits_total": stats.num_prefix_hit_tokens,
        "vllm:spec_decode_num_drafts_total": stats.num_drafts,
        "vllm:spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": stats.num_accepted_tokens,
    }
    samples: dict[str, Samples] = {name: {(): value} for name, value in scalars.items()}
    samples["vllm:cache_config_info"] = {cache_labels: 1.0}
    samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"] = {(str(position),): count for position, count in enumerate(accepted)}
    samples["paceline_step_seconds"] = {(phase,): Total(stats.num_steps, seconds) for phase, seconds in phases.items()}
    return samples


def _request_samples(requests: RequestMetrics) -> dict[str, Samples]:
    samples: dict[str, Samples] = {name: {(): histogram} for name, histogram in requests.histograms.items()}
    samples["vllm:request_success_total"] = {(reason.value,): count for reason, count in requests.finished_by_reason.items()}
    samples["llm_latency_seconds"] = {(kind,): histogram for kind, histogram in requests.latency_by_type.items()}
    samples["llm_throughput_requests_per_second"] = {(): requests.throughput()}
    samples["paceline_errors_total"] = {(kind.value,): count for kind, count in requests.errors.items()}
    return samples


def _family(metric: Metric, samples: Samples, model_name: str) -> Family:
    common = {"model_name": model_name, "engine": _ENGINE} if metric.name.startswith("vllm:") else {}
    labels = (*common, *metric.labels)
    documentation = f"{metric.formula} ({metric.unit})"
    rows = [((*common.values(), *values), value) for values, value in samples.items()]
    match metric.kind:
        case Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, documentation, labels=labels)
            for values, value in rows:
                assert isinstance(value, Histogram)
                family.add_metric(values, value.cumulative(), value.sum)
        case Kind.SUMMARY:
            family = SummaryMetricFamily(metric.name, documentation, labels=labels)
            for values, value in rows:
                assert isinstance(value, Total)
                family.add_metric(values, value.count, value.sum)
        case Kind.GAUGE | Kind.COUNTER:
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(metric.name, documentation, labels=labels)
            for values, value in rows:
                assert isinstance(value, int | float)
                family.add_metric(values, value)
    return family
