"""Observations of requests: time per token from token counts, what is counted when, the throughput window."""

import math
import random

import pytest

from paceline.core.request import FinishReason
from paceline.metrics.catalog import CATALOG, Kind
from paceline.metrics.requests import _MAX_UNCOUNTED, THROUGHPUT_WINDOW_S, ErrorKind, FinishedRequest, Histogram, RequestMetrics


def finished(reason: FinishReason = FinishReason.STOP, **changes: float) -> FinishedRequest:
    numbers = {
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "num_spec_steps": 0,
        "e2e_s": 1.0,
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.7,
        "token_span_s": 0.8,
    }
    return FinishedRequest(finish_reason=reason, **{**numbers, **changes})


def test_histogram_counts_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, weight in ((1.0, 1), (1.5, 2), (9.0, 1)):
        histogram.observe(value, weight)
    assert histogram.totals() == [1, 3, 4]
    assert histogram.sum == 1.0 + 2 * 1.5 + 9.0


@pytest.mark.parametrize("num_values", [0, 1, _MAX_UNCOUNTED - 1, _MAX_UNCOUNTED, 3 * _MAX_UNCOUNTED + 7])
def test_observations_that_wait_are_counted_like_single_ones(num_values: int) -> None:
    """Whenever it is read, and where a value is a bound."""
    draw, bounds = random.Random(num_values), (0.25, 0.5, 1.0)
    values = [draw.choice((0.0, 0.25, 0.3, 0.5, 0.75, 1.0, 1.5)) for _ in range(num_values)]
    histogram = Histogram(bounds)
    for index, value in enumerate(values):
        histogram.observe(value, 1 + (index % 5 == 0))
        if index % 700 == 10:
            assert histogram.totals()[-1] == histogram.count
    seen = [value for index, value in enumerate(values) for _ in range(1 + (index % 5 == 0))]
    assert histogram.sum == pytest.approx(math.fsum(seen))
    assert histogram.totals() == [sum(value <= bound for value in seen) for bound in (*bounds, math.inf)]
    assert histogram.count == len(seen)


def totals_by_bound(metrics: RequestMetrics, name: str) -> dict[float, int]:
    return dict(zip((*CATALOG[name].buckets, math.inf), metrics.histograms[name].totals(), strict=True))


def test_tokens_of_one_step_share_its_time() -> None:
    """A step of 4 tokens that took 40 ms is four tokens of 10 ms each, not one gap of 40 ms."""
    metrics = RequestMetrics()
    metrics.next_tokens(0.040, 4)
    histogram = metrics.histograms["vllm:inter_token_latency_seconds"]
    below = totals_by_bound(metrics, "vllm:inter_token_latency_seconds")
    assert (below[0.0075], below[0.01], below[math.inf]) == (0, 4, 4)
    assert abs(histogram.sum - 0.040) < 1e-12


def test_the_gap_between_chunks_is_published_apart() -> None:
    """What a client sees between chunks says nothing of the time per token, and the other way round."""
    metrics = RequestMetrics()
    metrics.next_tokens(0.040, 4)
    metrics.next_tokens(0.010, 1)
    gaps, tokens = metrics.histograms["paceline_chunk_gap_seconds"], metrics.histograms["vllm:inter_token_latency_seconds"]
    assert (gaps.count, tokens.count) == (2, 5)
    below = [totals_by_bound(metrics, name)[0.01] for name in ("paceline_chunk_gap_seconds", "vllm:inter_token_latency_seconds")]
    assert below == [1, 5]
    assert abs(gaps.sum - tokens.sum) < 1e-12


def test_a_delta_without_tokens_is_no_token() -> None:
    metrics = RequestMetrics()
    metrics.next_tokens(0.5, 0)
    assert metrics.histograms["paceline_chunk_gap_seconds"].count == 0
    assert metrics.histograms["vllm:inter_token_latency_seconds"].count == 0


def test_time_per_output_token_uses_token_counts() -> None:
    metrics = RequestMetrics()
    metrics.finished(finished(num_output_tokens=5, token_span_s=0.8))
    assert metrics.histograms["vllm:request_time_per_output_token_seconds"].sum == 0.8 / 4


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = RequestMetrics()
    metrics.finished(finished(num_output_tokens=1, token_span_s=0.0))
    assert metrics.histograms["vllm:request_time_per_output_token_seconds"].count == 0
    assert metrics.histograms["vllm:e2e_request_latency_seconds"].count == 1


def test_latency_is_told_apart_by_speculation() -> None:
    metrics = RequestMetrics()
    metrics.finished(finished(num_spec_steps=3, e2e_s=2.0))
    metrics.finished(finished(num_spec_steps=0, e2e_s=5.0))
    assert metrics.latency_by_type["speculative"].sum == 2.0
    assert metrics.latency_by_type["baseline"].sum == 5.0


def test_failed_late_and_aborted_requests_are_counted_without_latency() -> None:
    metrics = RequestMetrics()
    metrics.finished(finished(FinishReason.ABORT))
    metrics.finished(finished(FinishReason.ERROR))
    metrics.finished(finished(FinishReason.TIMEOUT))
    assert metrics.finished_by_reason == {
        FinishReason.STOP: 0,
        FinishReason.LENGTH: 0,
        FinishReason.TIMEOUT: 1,
        FinishReason.ABORT: 1,
        FinishReason.ERROR: 1,
    }
    assert all(histogram.totals()[-1] == 0 for histogram in metrics.histograms.values())
    assert metrics.throughput() == 0


def test_throughput_is_that_of_the_window() -> None:
    now_s = [100.0]
    metrics = RequestMetrics(clock=lambda: now_s[0])
    for _ in range(6):
        metrics.finished(finished())
    now_s[0] += THROUGHPUT_WINDOW_S - 1
    metrics.finished(finished())
    assert metrics.throughput() == 7 / THROUGHPUT_WINDOW_S
    now_s[0] += 1
    assert metrics.throughput() == 1 / THROUGHPUT_WINDOW_S
    now_s[0] += THROUGHPUT_WINDOW_S
    assert metrics.throughput() == 0


def test_errors_are_counted_by_kind() -> None:
    metrics = RequestMetrics()
    metrics.error(ErrorKind.BAD_INPUT)
    assert (metrics.errors[ErrorKind.BAD_INPUT], metrics.errors[ErrorKind.INTERNAL]) == (1, 0)


def test_every_unlabelled_histogram_of_the_catalogue_exists() -> None:
    names = {metric.name for metric in CATALOG.values() if metric.kind is Kind.HISTOGRAM and not metric.labels}
    assert RequestMetrics().histograms.keys() == names


def test_buckets_are_a_superset_of_vllms() -> None:
    per_token = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
    request = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
    first = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
    vllm = {
        "vllm:time_to_first_token_seconds": first,
        "vllm:inter_token_latency_seconds": per_token,
        "vllm:request_time_per_output_token_seconds": per_token,
        **{f"vllm:request_{phase}_time_seconds": request for phase in ("queue", "prefill", "decode")},
        "vllm:e2e_request_latency_seconds": request,
    }
    for name, bounds in vllm.items():
        buckets = CATALOG[name].buckets
        assert set(bounds) <= set(buckets), name
        assert list(buckets) == sorted(set(buckets)), name
