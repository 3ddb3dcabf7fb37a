"""Renders the catalogue in Prometheus' text format from the engine's latest statistics and the server's observations.

Called by `server/app.py` for each scrape. No registry and no state: a scrape reads what the owners hold. Written here because a scrape
holds up the event loop, and so every stream: the client library takes four times as long for the same lines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.core.facts import EngineFacts
from paceline.core.stats import EngineStats, GuardState, SwitchOff
from paceline.metrics.catalog import CATALOG, Kind, Metric
from paceline.metrics.requests import Histogram, RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE = "0"  # vLLM's label for one of several engines behind a server
_OFF = (GuardState.PLAIN, GuardState.TRIAL, GuardState.INSOLVENT)  # while measuring, speculation is on


@dataclass(frozen=True, slots=True)
class Total:
    """A summary: how often and how long in all."""

    count: int
    sum: float


# A counter's name comes with its `_total`, as this version of the format has it.
_HEADS = {name: f"# HELP {name} {metric.formula} ({metric.unit})\n# TYPE {name} {metric.kind.value}\n" for name, metric in CATALOG.items()}

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
    samples = {**_engine_samples(snapshot), **_request_samples(snapshot.requests)}
    parts = [part for metric in CATALOG.values() for part in _family(metric, samples[metric.name], snapshot.model_name)]
    return "".join(parts).encode(errors="replace")


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
    samples["gpu_utilization_percent"] = {}  # an engine of this build runs on CPUs
    samples["paceline_speedup_ratio"] = {("step", each.band): each.ratio for each in stats.speedups}
    samples["paceline_speedup_ratio_low"] = {("step", each.band): each.low for each in stats.speedups}
    samples["paceline_speedup_ratio_high"] = {("step", each.band): each.high for each in stats.speedups}
    samples["paceline_draft_length"] = {(band,): length for band, length in stats.draft_length_by_band.items()}
    samples["paceline_guard_state"] = {(band,): state not in _OFF for band, state in stats.guard_state_by_band.items()}
    switch_offs = stats.num_switch_offs_by_reason
    samples["paceline_guard_switch_offs_total"] = {(reason.value,): switch_offs.get(reason.value, 0) for reason in SwitchOff}
    is_known = facts.memory_bandwidth > 0 and stats.decode_read_rate > 0
    samples["paceline_memory_bandwidth_fraction"] = {(): stats.decode_read_rate / facts.memory_bandwidth} if is_known else {}
    samples["paceline_step_seconds"] = {(phase,): Total(stats.num_steps, seconds) for phase, seconds in phases.items()}
    return samples


def _request_samples(requests: RequestMetrics) -> dict[str, Samples]:
    samples: dict[str, Samples] = {name: {(): histogram} for name, histogram in requests.histograms.items()}
    samples["vllm:request_success_total"] = {(reason.value,): count for reason, count in requests.finished_by_reason.items()}
    samples["llm_latency_seconds"] = {(kind,): histogram for kind, histogram in requests.latency_by_type.items()}
    samples["llm_throughput_requests_per_second"] = {(): requests.throughput()}
    samples["paceline_errors_total"] = {(kind.value,): count for kind, count in requests.errors.items()}
    return samples


def _family(metric: Metric, samples: Samples, model_name: str) -> Iterator[str]:
    yield _HEADS[metric.name]
    for values, value in samples.items():
        match value:
            case Histogram():
                numbers = (*value.totals(), value.count, value.sum)
            case Total():
                numbers = (value.count, value.sum)
            case _:
                numbers = (float(value),)
        yield _template(metric.name, model_name, values) % numbers


@lru_cache(maxsize=1024)  # they never change, and writing them is most of the work; label values are of fixed sets
def _template(metric_name: str, model_name: str, values: tuple[str, ...]) -> str:
    """The lines that one value takes, in their order, with a place for each number."""
    metric = CATALOG[metric_name]
    common = {"model_name": model_name, "engine": _ENGINE} if metric_name.startswith("vllm:") else {}
    labels = {**common, **dict(zip(metric.labels, values, strict=True))}
    parts = [f"{metric_name}_count{_labels(labels)}", f"{metric_name}_sum{_labels(labels)}"]
    match metric.kind:
        case Kind.HISTOGRAM:
            bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
            series = [*(f"{metric_name}_bucket{_labels({**labels, 'le': bound})}" for bound in bounds), *parts]
        case Kind.SUMMARY:
            series = parts
        case _:
            series = [f"{metric_name}{_labels(labels)}"]
    names = [name.replace("%", "%%") for name in series]
    # All but the last are counts, which take a fraction of the time as whole numbers; what is read is the same.
    return "".join([f"{name} %d.0\n" for name in names[:-1]] + [f"{names[-1]} %r\n"])


def _labels(labels: Mapping[str, str]) -> str:
    """`{name="value",...}` in the order of the names; nothing if there are none."""
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
