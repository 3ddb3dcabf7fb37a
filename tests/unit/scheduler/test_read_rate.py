from dataclasses import replace

import pytest

from paceline.scheduler.observation import StepObservation
from paceline.scheduler.read_rate import ReadRate
from tests.unit.scheduler.driver import make_facts

STEP = StepObservation(
    num_rows=2,
    num_context_tokens=100,
    num_drafted_tokens=0,
    num_emitted_tokens=2,
    num_target_tokens=2,
    has_prefill=False,
    is_control=False,
    duration_ms=10.0,
    propose_ms=0.0,
)


def test_weights_once_and_the_context_of_all_rows_per_second() -> None:
    facts = replace(make_facts(page_size=4), target_weight_bytes=1_000_000, target_page_bytes=400)
    rate = ReadRate(facts)
    assert rate.bytes_per_s() == 0
    rate.observe_step(replace(STEP, has_prefill=True, duration_ms=1000.0))
    assert rate.bytes_per_s() == 0, "prompts are bound by arithmetic"
    rate.observe_step(STEP)
    assert rate.bytes_per_s() == pytest.approx((1_000_000 + 100 * 100) / 0.010)
    for _ in range(50):
        rate.observe_step(replace(STEP, num_target_tokens=12, num_drafted_tokens=10))
    assert rate.bytes_per_s() == pytest.approx(101_000_000), "drafts read nothing more"


def test_it_is_a_mean_over_time_that_forgets() -> None:
    facts = replace(make_facts(), target_weight_bytes=1_000_000, target_page_bytes=0)
    rate = ReadRate(facts)
    rate.observe_step(STEP)
    rate.observe_step(replace(STEP, duration_ms=30.0))
    assert rate.bytes_per_s() == pytest.approx(2_000_000 / 0.040, rel=0.01), "by time, not by step"
    for _ in range(2000):
        rate.observe_step(replace(STEP, duration_ms=5.0))
    assert rate.bytes_per_s() == pytest.approx(200_000_000, rel=0.01)
