"""Thresholds: what is read, what is refused, and what they make of a measurement."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import BadInputError
from paceline.prove.criteria import METRICS, SHIPPED, Evidence, evaluate, load_criteria, parse_criteria
from paceline.prove.judgement import JudgeOptions, Objectives, Utilisation
from paceline.prove.record import Arm
from paceline.prove.results import Criterion
from paceline.prove.speedup import analyse
from paceline.prove.summary import summarise
from tests.fakes.synthetic_server import SyntheticServer

MEASUREMENT = SyntheticServer(prefill_ms=400.0, num_tokens=40).measure(("qa",), 16, concurrencies=(1, 4))
ARMS = summarise(MEASUREMENT.records, MEASUREMENT.runs, Objectives())
EVIDENCE = Evidence(ARMS, analyse((), 199, 0).speedup, MEASUREMENT.records, "synthetic-1b", JudgeOptions(prompts=()))


def judged(entry: str, evidence: Evidence = EVIDENCE) -> Criterion:
    (criterion,) = evaluate(parse_criteria(f"name: t\ncriteria: [{{name: it, {entry}}}]", "t.yaml"), evidence)
    return criterion


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_criteria_are_read(name: str) -> None:
    criteria = load_criteria(name)
    assert criteria.name == name
    assert all(rule.required for rule in criteria.rules)


def test_the_source_designs_thresholds() -> None:
    rules = {rule.metric: rule for rule in load_criteria("source").rules}
    assert (rules["ttft_ms"].at_most, rules["tpot_ms"].statistic, rules["tpot_ms"].at_most) == (500, "p95", 200)
    assert (rules["requests_per_s"].at_least, rules["error_rate"].at_most, rules["gpu_utilisation_percent"].at_least) == (200, 0.001, 80)
    assert rules["requests_per_s"].min_output_tokens > 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("metric: ttft_ms, at_mots: 3", "unknown key 'at_mots'"),
        ("metric: ttfb_ms, at_most: 3", "`metric` is 'ttfb_ms'; allowed: " + ", ".join(METRICS)),
        ("metric: ttft_ms", "one of `at_most` and `at_least`"),
        ("metric: ttft_ms, at_most: 3, at_least: 1", "one of `at_most` and `at_least`"),
        ("metric: ttft_ms, at_most: fast", "`at_most` is 'fast'; write a number"),
        ("metric: ttft_ms, at_most: true", "write a number"),
        ("metric: ttft_ms, at_most: .nan", "write a number"),
        ("metric: ttft_ms, at_most: -1", "write a number of 0 or more"),
        ("metric: ttft_ms, at_most: 3, statistic: p90", "allowed: p50, p95, p99"),
        ("metric: user_tps, at_least: 3, statistic: p95", "`statistic` is for times only"),
        ("metric: ttft_ms, at_most: 3, concurrency: 0", "each, highest, or a number"),
        ("metric: ttft_ms, at_most: 3, arm: fast", "allowed: baseline, speculative"),
        ("metric: ttft_ms, at_most: 3, required: maybe", "write true or false"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_remedy(entry: str, words: str) -> None:
    with pytest.raises(BadInputError) as raised:
        judged(entry)
    assert words in str(raised.value)
    assert "t.yaml, criterion 1" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "expected keys and values, found list"),
        ("name: x", "`criteria` must be a list"),
        ("criteria: [{name: x, metric: ttft_ms, at_most: 1}]", "`name` is None"),
        ("name: x\ncriteria: []", "`criteria` must be a list"),
        ("name: x\ncriterias: []", "unknown key 'criterias'"),
        ("a: [", "is no YAML"),
        ("name: x\ncriteria: [{name: a, metric: ttft_ms, at_most: 1}, {name: a, metric: tpot_ms, at_most: 1}]", "the same name"),
        ("!!python/object/apply:os.system ['true']", "is no YAML"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadInputError, match=r"bad\.yaml") as raised:
        parse_criteria(text, "bad.yaml")
    assert words in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"one of cpu, source"):
        load_criteria(tmp_path / "none.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(BadInputError, match="more than"):
        load_criteria(tmp_path / "big.yaml")
    (tmp_path / "mine.yaml").write_text("name: mine\ncriteria: [{name: a, metric: tpot_ms, at_most: 1}]")
    assert load_criteria(tmp_path / "mine.yaml").rules[0].statistic == "p95"


def test_a_threshold_is_held_against_the_worst_concurrency() -> None:
    met, missed = judged("metric: ttft_ms, at_most: 400.1"), judged("metric: ttft_ms, at_most: 399.9")
    assert (met.passed, missed.passed) == (True, False)
    assert met.value == pytest.approx(400.0)
    assert met.threshold == "p95 <= 400.1 ms (synthetic-1b, 100 prompt and 40 output tokens on average, at concurrency 1, concurrency 4)"
    by_point = [arm.requests_per_s for arm in ARMS if arm.arm is Arm.SPECULATIVE and arm.category == "overall"]
    assert judged("metric: requests_per_s, at_least: 0").value == min(value for value in by_point if value is not None)
    assert judged("metric: requests_per_s, at_least: 0, concurrency: highest").value == by_point[-1]
    assert judged("metric: user_tps, at_least: 1, arm: baseline, concurrency: 1").value == pytest.approx(1000 / 30)


def test_what_was_not_measured_is_neither_passed_nor_failed() -> None:
    for entry, words in (
        ("metric: gpu_utilisation_percent, at_least: 80", "no counter of a GPU could be read here"),
        ("metric: ttft_ms, at_most: 3, concurrency: 1000", "concurrency 1000 was not measured"),
        ("metric: requests_per_s, at_least: 1, min_output_tokens: 41", "not measured under the stated lengths"),
        ("metric: speedup, at_least: 1", "of the mix"),
    ):
        criterion = judged(entry)
        assert (criterion.value, criterion.passed) == (None, None)
        assert words in criterion.threshold


def test_errors_are_counted_over_all_requests() -> None:
    records = tuple(replace(record, error="cut") if record.question_id == "qa-0" else record for record in MEASUREMENT.records)
    criterion = judged("metric: error_rate, at_most: 0.001", replace(EVIDENCE, records=records))
    assert criterion.value == pytest.approx(1 / 16)
    assert criterion.passed is False
    assert "2 of 32 requests" in criterion.threshold


def test_utilisation_names_its_counter_and_the_bandwidth_beside_it() -> None:
    busy = {Arm.SPECULATIVE: Utilisation(85.0, "DCGM_FI_PROF_SM_ACTIVE", 0.4)}
    told = replace(EVIDENCE, options=JudgeOptions(prompts=(), utilisation=busy))
    criterion = judged("metric: gpu_utilisation_percent, at_least: 80", told)
    assert criterion.passed is True
    assert criterion.threshold == ">= 80 % (by DCGM_FI_PROF_SM_ACTIVE; memory bandwidth used: 40%)"
    assert judged("metric: bandwidth_fraction, at_least: 0.3", told).value == 0.4
    of_cpu = {Arm.SPECULATIVE: Utilisation(99.0, "CPU time", 0.6, device="cpu")}
    on_cpu = replace(EVIDENCE, options=JudgeOptions(prompts=(), utilisation=of_cpu))
    assert judged("metric: gpu_utilisation_percent, at_least: 80", on_cpu).passed is None
    assert judged("metric: bandwidth_fraction, at_least: 0.5", on_cpu).passed is True
    assert judged("metric: bandwidth_fraction, at_least: 0.5").passed is None
