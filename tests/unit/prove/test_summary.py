"""Known latencies, step times and acceptance of a synthetic server, found again."""

import pytest

from paceline.prove.judgement import Objectives
from paceline.prove.record import Arm, Phase
from paceline.prove.results import OVERALL
from paceline.prove.summary import pareto_points, projected_ratio, step_ms, summarise
from tests.fakes.answers import answer, block_run
from tests.fakes.synthetic_server import SyntheticServer

SERVER = SyntheticServer(prefill_ms=900.0, plain_step_ms=30.0, draft_step_ms=40.0, num_tokens=200)


def test_known_latencies_are_recovered() -> None:
    measurement = SERVER.measure(("qa", "math"), 16)
    arms = {(each.arm, each.category): each for each in summarise(measurement.records, measurement.runs, Objectives())}
    assert list(arms)[-1] == (Arm.SPECULATIVE, OVERALL)
    plain, drafted = arms[Arm.BASELINE, OVERALL], arms[Arm.SPECULATIVE, OVERALL]
    assert plain.ttft_ms is not None
    assert plain.ttft_ms.p50 == pytest.approx(900.0)
    assert plain.tpot_ms is not None
    assert plain.tpot_ms.p99 == pytest.approx(30.0)
    assert plain.itl_ms is not None
    assert plain.itl_ms.p50 == pytest.approx(30.0)
    assert plain.user_tps == pytest.approx(1000 / 30)
    assert plain.output_tps == pytest.approx(200 / (0.9 + 199 * 0.03))
    assert plain.requests_per_s == pytest.approx(1 / (0.9 + 199 * 0.03))
    assert plain.step_ms == pytest.approx(30.0)
    assert drafted.step_ms == pytest.approx(40.0, rel=0.01)
    assert drafted.chunk_gap_ms is not None
    assert drafted.chunk_gap_ms.p50 == pytest.approx(40.0)
    assert drafted.itl_ms is not None
    assert drafted.itl_ms.p50 < 40.0 / 2  # most tokens come three or four at a time
    assert drafted.acceptance_length is not None
    assert drafted.acceptance_length.token_weighted == pytest.approx(SERVER.tokens_per_draft_step, rel=0.03)
    assert drafted.conditional_acceptance == pytest.approx(SERVER.hazards, abs=0.04)
    assert arms[Arm.BASELINE, "qa"].output_tps is None  # categories share a block's wall time
    assert arms[Arm.BASELINE, "qa"].num_requests == 16


def test_wait_for_the_first_token_is_no_step() -> None:
    """With it, a step of 40 ms after 900 ms of waiting would look like one of 50 or more."""
    measurement = SERVER.measure(("qa",), 8)
    drafted = [record for record in measurement.records if record.arm is Arm.SPECULATIVE]
    assert step_ms(drafted) == pytest.approx(40.0, rel=0.01)
    with_the_gap = sum(record.end_s - record.sent_s for record in drafted) * 1e3 / sum(len(record.chunk_times_s) for record in drafted)
    assert with_the_gap > 48.0


@pytest.mark.parametrize("plain_share", [0.0, 0.5])
def test_projection_is_the_speed_up_of_decoding(plain_share: float) -> None:
    server = SyntheticServer(prefill_ms=0.0, num_tokens=400, plain_share=plain_share)
    measurement = server.measure(("qa",), 16)
    arms = {arm: [record for record in measurement.records if record.arm is arm] for arm in Arm}
    measured = sum(record.end_s - record.sent_s for record in arms[Arm.BASELINE]) / sum(
        record.end_s - record.sent_s for record in arms[Arm.SPECULATIVE]
    )
    assert projected_ratio(arms[Arm.BASELINE], arms[Arm.SPECULATIVE]) == pytest.approx(measured, rel=0.01)
    mean_tokens = plain_share + (1 - plain_share) * server.tokens_per_draft_step
    mean_step_ms = plain_share * 30 + (1 - plain_share) * 40
    assert measured == pytest.approx(30 * mean_tokens / mean_step_ms, rel=0.03)


def test_errors_are_counted_and_miss_the_objectives_but_have_no_latency() -> None:
    records = [
        answer(times_s=(0.1, 0.2), tokens=(1, 1)),
        answer(times_s=(0.1, 9.0), tokens=(1, 1), error="stream cut"),
        answer(times_s=(0.1, 0.5), tokens=(1, 1)),  # 400 ms for a token
        answer(times_s=(99.0, 99.1), tokens=(1, 1), phase=Phase.WARM_UP),
    ]
    *_, overall = summarise(records, [block_run(Arm.SPECULATIVE, 2.0)], Objectives())
    assert (overall.num_requests, overall.num_errors, overall.num_output_tokens) == (3, 1, 4)
    assert overall.goodput == pytest.approx(1 / 3)
    assert overall.e2e_ms is not None
    assert overall.e2e_ms.p99 < 501
    assert overall.output_tps == pytest.approx(2.0)


def test_throughput_per_gpu_is_there_only_where_gpus_are_known() -> None:
    measurement = SERVER.measure(("qa",), 32)
    arms = summarise(measurement.records, measurement.runs, Objectives(), {Arm.BASELINE: None, Arm.SPECULATIVE: 4})
    by_arm = {one.arm: one for one in arms if one.category == OVERALL}
    fast = by_arm[Arm.SPECULATIVE]
    assert fast.output_tps is not None
    assert fast.output_tps_per_gpu == pytest.approx(fast.output_tps / 4)
    assert by_arm[Arm.BASELINE].output_tps_per_gpu is None
    assert all(one.output_tps_per_gpu is None for one in summarise(measurement.records, measurement.runs, Objectives()))


def test_pareto_has_a_point_per_arm_and_concurrency() -> None:
    measurement = SERVER.measure(("qa",), 32, concurrencies=(1, 4))
    points = pareto_points(summarise(measurement.records, measurement.runs, Objectives()))
    assert [(point.concurrency, point.arm) for point in points] == [(c, arm) for c in (1, 4) for arm in (Arm.BASELINE, Arm.SPECULATIVE)]
    assert points[2].output_tps > 1.9 * points[0].output_tps
