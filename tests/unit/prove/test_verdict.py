"""The verdict on servers whose truth is known."""

from dataclasses import replace

import pytest

from paceline.prove.criteria import Criteria, parse_criteria
from paceline.prove.datasets.load import load
from paceline.prove.datasets.prompt import CATEGORIES
from paceline.prove.judgement import Judgement, JudgeOptions
from paceline.prove.plan import Measurement
from paceline.prove.record import Arm
from paceline.prove.results import OVERALL, Verdict
from paceline.prove.verdict import judge
from tests.fakes.synthetic_server import Noise, SyntheticServer

OPTIONS = JudgeOptions(prompts=load("speed-bench-like", "qualitative").prompts[:20], num_resamples=499)
QUICK = replace(OPTIONS, is_quick=True)
CALM = Noise(jitter=0.02)
FAST = SyntheticServer(num_tokens=60, noise=CALM)
ONE_TOKEN = SyntheticServer(num_tokens=60, noise=CALM, hazards=(0.0,), draft_step_ms=30.0)  # drafts that are never right and cost nothing
SLOW = replace(ONE_TOKEN, draft_step_ms=33.0)


def criteria(entry: str) -> Criteria:
    return parse_criteria(f"name: t\ncriteria: [{{name: it, {entry}}}]", "t.yaml")


def with_slow(measurement: Measurement, category: str, factor: float) -> Measurement:
    """One category's answers of the speculative arm take `factor` times as long."""
    changed = [
        replace(record, end_s=record.sent_s + factor * (record.end_s - record.sent_s))
        if record.category == category and record.arm is Arm.SPECULATIVE
        else record
        for record in measurement.records
    ]
    return replace(measurement, records=tuple(changed))


def told(judgement: Judgement) -> str:
    return "\n".join(judgement.reasons)


def test_a_faster_server_passes_at_every_concurrency() -> None:
    judgement = judge(FAST.measure(("qa", "math"), 32, 8, (1, 4, 16)), None, OPTIONS)
    assert judgement.verdict is Verdict.PASS
    assert "Holm over 3" in judgement.reasons[0]
    assert "no slower anywhere" in told(judgement)
    assert len(judgement.speedup) == 9
    assert len(judgement.pareto) == 6


def test_known_ratio_is_recovered() -> None:
    server = replace(FAST, prefill_ms=0.0, num_tokens=300)
    measurement = server.measure(("qa", "math"), 32)
    judgement = judge(measurement, None, OPTIONS)
    (mix,) = (each for each in judgement.speedup if each.category == OVERALL)
    truth = 30 * server.tokens_per_draft_step / 40
    assert mix.ratio == pytest.approx(truth, rel=0.03)
    assert mix.ci95[0] < truth < mix.ci95[1]
    assert mix.projected_ratio == pytest.approx(truth, rel=0.03)
    assert mix.output_tps_ratio == pytest.approx(mix.ratio)
    assert mix.num_pairs == 64
    category = judgement.speedup[0]
    seconds = {
        arm: sum(
            record.end_s - record.sent_s for record in measurement.records if record.category == category.category and record.arm is arm
        )
        for arm in Arm
    }
    assert category.ratio == pytest.approx(seconds[Arm.BASELINE] / seconds[Arm.SPECULATIVE])
    assert mix.simultaneous_low is not None
    assert mix.simultaneous_low < mix.ci95[0]


def test_a_drift_that_abba_cancels_does_not_widen_the_interval() -> None:
    """With acceptance that never varies, so that drift and a little jitter are all there is."""
    calm = SyntheticServer(num_tokens=60, noise=Noise(jitter=0.005), hazards=(1.0,))
    widths = [
        mix.ci95[1] - mix.ci95[0]
        for server in (calm, replace(calm, noise=Noise(jitter=0.005, drift=0.3)))
        for mix in judge(server.measure(("qa", "math"), 32), None, OPTIONS).speedup
        if mix.category == OVERALL
    ]
    assert widths[1] < 1.5 * widths[0]


def test_a_slower_server_fails() -> None:
    judgement = judge(SLOW.measure(("qa", "math"), 32), None, OPTIONS)
    assert judgement.verdict is Verdict.FAIL
    assert "slower: " in judgement.reasons[0]


def test_one_slow_category_fails_a_server_that_is_faster_on_the_whole() -> None:
    measurement = with_slow(FAST.measure(("qa", "math", "coding"), 32), "math", 2.5)
    for options in (OPTIONS, QUICK):
        judgement = judge(measurement, None, options)
        assert judgement.verdict is Verdict.FAIL
        assert judgement.reasons[0].startswith("slower: math at concurrency 1 runs at 0.")


def test_a_server_that_is_neither_is_inconclusive_with_samples_needed() -> None:
    judgement = judge(ONE_TOKEN.measure(("qa", "math"), 32), None, OPTIONS)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "not shown to be faster: the mix at concurrency 1" in judgement.reasons[0]
    assert "more blocks (" in judgement.reasons[0]
    assert "more pairs of requests" in judgement.reasons[0]


def test_all_concurrencies_must_be_faster() -> None:
    """Measured one after the other: faster at 1, the same at 4."""
    fast, same = FAST.measure(("qa", "math"), 32, 8, (1,)), ONE_TOKEN.measure(("qa", "math"), 32, 8, (4,), seed=1)
    same_runs = tuple(replace(run, place=run.place + 1000) for run in same.runs)
    same_records = tuple(replace(record, place=record.place + 1000) for record in same.records)
    both = replace(fast, records=fast.records + same_records, runs=fast.runs + same_runs)
    judgement = judge(both, None, QUICK)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "concurrency 4" in judgement.reasons[0]
    assert judge(fast, None, QUICK).verdict is Verdict.PASS


def test_quick_proof_asks_less_of_cells_and_says_so() -> None:
    """Four prompts a category: the mix is shown to be faster, no category can be shown to be no slower."""
    server = SyntheticServer(num_tokens=60, noise=Noise(jitter=0.08), draft_step_ms=60.0)
    measurement = server.measure(CATEGORIES, 4, 8, (1, 4))
    quick, full = judge(measurement, None, QUICK), judge(measurement, None, OPTIONS)
    assert quick.verdict is Verdict.PASS
    assert "only checked for being slower with certainty" in told(quick)
    assert full.verdict is Verdict.INCONCLUSIVE
    assert "not shown to be no slower" in full.reasons[0]
    assert "only checked" not in told(full)


def test_required_criteria_decide() -> None:
    measurement = FAST.measure(("qa", "math"), 32)
    verdicts = {
        "metric: ttft_ms, at_most: 500": Verdict.PASS,
        "metric: ttft_ms, at_most: 50": Verdict.FAIL,
        "metric: ttft_ms, at_most: 50, required: false": Verdict.PASS,
        "metric: gpu_utilisation_percent, at_least: 80": Verdict.INCONCLUSIVE,
        "metric: gpu_utilisation_percent, at_least: 80, required: false": Verdict.PASS,
    }
    for entry, verdict in verdicts.items():
        judgement = judge(measurement, criteria(entry), QUICK)
        assert judgement.verdict is verdict, entry
        if "false" in entry:
            assert "it is not required" in told(judgement)
    unmeasured = judge(measurement, criteria("metric: gpu_utilisation_percent, at_least: 80"), QUICK)
    assert "could not be measured here" in unmeasured.reasons[0]


def test_answers_of_other_lengths_are_compared_per_token() -> None:
    measurement = FAST.measure(("qa", "math"), 32)
    longer = tuple(
        replace(record, num_output_tokens=63, acceptance=None, chunk_tokens=()) if record.arm is Arm.SPECULATIVE else record
        for record in measurement.records
    )
    same, other = judge(measurement, None, QUICK), judge(replace(measurement, records=longer), None, QUICK)
    assert "per output token" in told(other)
    assert "per output token" not in told(same)
    assert other.speedup[-1].ratio == pytest.approx(same.speedup[-1].ratio * 63 / 60)
    assert other.speedup[0].ratio == pytest.approx(same.speedup[0].ratio * 63 / 60)


def test_nothing_to_compare_is_inconclusive() -> None:
    measurement = FAST.measure(("qa",), 8)
    alone = replace(measurement, records=tuple(record for record in measurement.records if record.arm is Arm.BASELINE))
    judgement = judge(alone, None, OPTIONS)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "nothing was compared" in judgement.reasons[0]
    assert judgement.speedup == ()


def test_few_blocks_say_how_many_it_takes() -> None:
    judgement = judge(FAST.measure(("qa",), 2, 1), None, OPTIONS)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "measure at least 8" in judgement.reasons[0]


def test_the_same_records_give_the_same_judgement() -> None:
    measurement = FAST.measure(("qa",), 16)
    assert judge(measurement, None, OPTIONS) == judge(measurement, None, OPTIONS)
    assert judge(measurement, None, OPTIONS).speedup != judge(measurement, None, replace(OPTIONS, seed=1)).speedup


def test_null_servers_hardly_ever_pass() -> None:
    """From records to verdict; the thousand runs are in statistics/test_bootstrap.py."""
    null = SyntheticServer(num_tokens=12, noise=Noise(jitter=0.05), hazards=(0.0,), draft_step_ms=30.0)
    quick = replace(QUICK, num_resamples=199, prompts=())
    verdicts = [judge(null.measure(("qa",), 16, 8, (1,), seed=seed), None, quick).verdict for seed in range(20)]
    assert verdicts.count(Verdict.PASS) <= 3  # one run in forty may
    assert verdicts.count(Verdict.FAIL) <= 3
