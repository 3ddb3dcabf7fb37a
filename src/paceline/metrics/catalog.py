"""Every metric in one table: name, kind, unit, formula, source. `prometheus.py` renders exactly these; dashboards and tests read the names.

`vllm:*` names, labels and buckets are those of vLLM (buckets a superset), so that dashboards made for it work unchanged.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Source(StrEnum):
    """Who owns the number."""

    FACTS = "EngineFacts"
    ENGINE = "EngineStats"
    REQUESTS = "RequestMetrics"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` come after `model_name` and `engine`, which every `vllm:*` metric carries."""

    name: str  # as in the exposition, a counter's `_total` included
    kind: Kind
    unit: str
    formula: str
    source: Source
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, +Inf left out


# vLLM's bounds, with finer ones below 0.3 s: a per-token target of some milliseconds must be visible.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_PER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_TABLE = (
    Metric("vllm:num_requests_running", Kind.GAUGE, "requests", "requests that own a slot", Source.ENGINE),
    Metric("vllm:num_requests_waiting", Kind.GAUGE, "requests", "requests that wait for a slot or pages", Source.ENGINE),
    Metric("vllm:kv_cache_usage_perc", Kind.GAUGE, "share, 0 to 1", "1 - free pages / all pages", Source.ENGINE),
    Metric(
        "vllm:cache_config_info", Kind.GAUGE, "1", "constant; the labels tell the KV cache's configuration", Source.FACTS,
        ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
    Metric("vllm:prompt_tokens_total", Kind.COUNTER, "tokens", "prompt tokens of admitted requests, cached ones included", Source.ENGINE),
    Metric("vllm:generation_tokens_total", Kind.COUNTER, "tokens", "committed output tokens", Source.ENGINE),
    Metric("vllm:request_success_total", Kind.COUNTER, "requests", "ended requests by reason", Source.REQUESTS, ("finished_reason",)),
    Metric("vllm:num_preemptions_total", Kind.COUNTER, "preemptions", "requests that lost their pages to another one", Source.ENGINE),
    Metric("vllm:prefix_cache_queries_total", Kind.COUNTER, "tokens", "prompt tokens looked up in the prefix cache", Source.ENGINE),
    Metric("vllm:prefix_cache_hits_total", Kind.COUNTER, "tokens", "prompt tokens found in the prefix cache", Source.ENGINE),
    Metric("vllm:spec_decode_num_drafts_total", Kind.COUNTER, "drafts", "verifications of at least one draft token", Source.ENGINE),
    Metric("vllm:spec_decode_num_draft_tokens_total", Kind.COUNTER, "tokens", "draft tokens verified", Source.ENGINE),
    Metric("vllm:spec_decode_num_accepted_tokens_total", Kind.COUNTER, "tokens", "draft tokens accepted", Source.ENGINE),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", Kind.COUNTER, "tokens", "draft tokens accepted, by position in the draft",
        Source.ENGINE, ("position",),
    ),
    Metric(
        "vllm:time_to_first_token_seconds", Kind.HISTOGRAM, "s", "first delta - arrival", Source.REQUESTS, (), _FIRST_TOKEN_S,
    ),
    Metric(
        "vllm:inter_token_latency_seconds", Kind.HISTOGRAM, "s",
        "per output token after the first delta: (time since the delta before) / (tokens of this delta)", Source.REQUESTS, (), _PER_TOKEN_S,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds", Kind.HISTOGRAM, "s", "(last delta - first delta) / (output tokens - 1)",
        Source.REQUESTS, (), _PER_TOKEN_S,
    ),
    Metric("vllm:e2e_request_latency_seconds", Kind.HISTOGRAM, "s", "last delta - arrival", Source.REQUESTS, (), _REQUEST_S),
    Metric("vllm:request_queue_time_seconds", Kind.HISTOGRAM, "s", "admission - arrival", Source.REQUESTS, (), _REQUEST_S),
    Metric("vllm:request_prefill_time_seconds", Kind.HISTOGRAM, "s", "first token - admission", Source.REQUESTS, (), _REQUEST_S),
    Metric("vllm:request_decode_time_seconds", Kind.HISTOGRAM, "s", "last token - first token", Source.REQUESTS, (), _REQUEST_S),
    Metric("vllm:request_prompt_tokens", Kind.HISTOGRAM, "tokens", "prompt tokens per finished request", Source.REQUESTS, (), _TOKENS),
    Metric("vllm:request_generation_tokens", Kind.HISTOGRAM, "tokens", "output tokens per finished request", Source.REQUESTS, (), _TOKENS),
    Metric(
        "llm_latency_seconds", Kind.HISTOGRAM, "s",
        "last delta - arrival; speculative: the request verified at least one draft token", Source.REQUESTS, ("type",), _REQUEST_S,
    ),
    Metric("llm_throughput_requests_per_second", Kind.GAUGE, "requests/s", "requests finished in the last 30 s / 30 s", Source.REQUESTS),
    Metric(
        "paceline_chunk_gap_seconds", Kind.HISTOGRAM, "s", "time between two deltas of a request, however many tokens they hold: what a "
        "client sees between chunks; the time per token is vllm:inter_token_latency_seconds", Source.REQUESTS, (), _PER_TOKEN_S,
    ),
    Metric(
        "gpu_utilization_percent", Kind.GAUGE, "%", "busy time of each GPU as its driver counts it; no samples on CPUs", Source.ENGINE,
        ("gpu",),
    ),
    Metric(
        "paceline_speedup_ratio", Kind.GAUGE, "1",
        "committed tokens per row-second of decoding rows, speculative over plain: short blocks of steps without drafts for anyone against "
        "the steps around them; by range of batch and context, from 30 blocks on, of the last 128", Source.ENGINE, ("kind", "band"),
    ),
    Metric(
        "paceline_speedup_ratio_low", Kind.GAUGE, "1", "lower end of the 95 % interval of paceline_speedup_ratio", Source.ENGINE,
        ("kind", "band"),
    ),
    Metric(
        "paceline_speedup_ratio_high", Kind.GAUGE, "1", "upper end of the 95 % interval of paceline_speedup_ratio", Source.ENGINE,
        ("kind", "band"),
    ),
    Metric(
        "paceline_draft_length", Kind.GAUGE, "tokens", "drafts planned for a row that may draft, a recent mean by range of batch",
        Source.ENGINE, ("band",),
    ),
    Metric(
        "paceline_guard_state", Kind.GAUGE, "1 or 0", "by range of batch: 1 speculation is on; 0 it is off, at most tried now and then",
        Source.ENGINE, ("band",),
    ),
    Metric(
        "paceline_guard_switch_offs_total", Kind.COUNTER, "events", "how often the guard cut speculation short, by reason", Source.ENGINE,
        ("reason",),
    ),
    Metric(
        "paceline_memory_bandwidth_fraction", Kind.GAUGE, "share",
        "what decode steps must read at least, the target's weights once and the KV of all rows' tokens, per second of these steps, over "
        "the read bandwidth measured at start; recent steps without prompts", Source.ENGINE,
    ),
    Metric("paceline_step_seconds", Kind.SUMMARY, "s", "time of engine steps by phase; total is all of it", Source.ENGINE, ("phase",)),
    Metric("paceline_errors_total", Kind.COUNTER, "errors", "error answers by kind", Source.REQUESTS, ("kind",)),
)  # fmt: skip

CATALOG = {metric.name: metric for metric in _TABLE}
