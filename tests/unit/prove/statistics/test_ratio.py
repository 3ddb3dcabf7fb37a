"""What a ratio of totals is, and its standard error."""

import numpy as np
import pytest

from paceline.prove.statistics.ratio import Design, log_ratio, log_ratio_per_token
from tests.fakes.synthetic_server import Noise, paired_seconds

ONE_BLOCK_EACH = Design(np.arange(4), np.array([True, False, True, False]))


def test_a_ratio_is_of_totals_and_not_a_mean_of_ratios() -> None:
    baseline, other = np.array([10.0, 1.0, 1.0, 1.0]), np.array([5.0, 2.0, 2.0, 2.0])
    assert np.exp(log_ratio(baseline, other, ONE_BLOCK_EACH).value) == pytest.approx(13 / 11)
    assert (baseline / other).mean() < 1  # the mean of ratios calls the same arm slower


def test_a_mean_of_ratios_claims_a_speed_up_under_pure_noise() -> None:
    runs = paired_seconds(np.random.default_rng(0), 400, 16, Noise(jitter=0.5), 1.0, spread=0.0)
    of_totals = log_ratio(runs.baseline_s, runs.speculative_s, runs.design).value
    assert np.mean(of_totals) == pytest.approx(0.0, abs=0.01)
    assert np.mean(runs.baseline_s / runs.speculative_s) > 1.2


def test_ratio_per_token_forgives_answers_of_another_length() -> None:
    seconds, tokens = np.array([4.0, 8.0, 4.0, 8.0]), np.array([40.0, 80.0, 40.0, 80.0])
    longer = log_ratio_per_token((seconds, tokens), (seconds, 2 * tokens), ONE_BLOCK_EACH)  # twice the tokens in the same time
    assert np.exp(longer.value) == pytest.approx(2.0)
    assert np.exp(log_ratio(seconds, seconds, ONE_BLOCK_EACH).value) == pytest.approx(1.0)


def test_influence_is_the_derivative_by_a_pairs_weight() -> None:
    rng = np.random.default_rng(1)
    baseline, other = rng.random(4) + 1, rng.random(4) + 1
    base_tokens, other_tokens = rng.random(4) + 1, rng.random(4) + 1
    estimate = log_ratio_per_token((baseline, base_tokens), (other, other_tokens), ONE_BLOCK_EACH)
    for pair in range(4):
        weight = np.ones(4)
        weight[pair] += 1e-6
        parts = [(weight * part).sum() for part in (baseline, other_tokens, other, base_tokens)]
        moved = np.log(parts[0] * parts[1] / parts[2] / parts[3])
        assert (moved - estimate.value) / 1e-6 == pytest.approx(estimate.influence[pair], abs=1e-5)
    assert estimate.influence.sum() == pytest.approx(0.0, abs=1e-12)


def test_what_the_order_of_arms_explains_is_no_noise() -> None:
    """A steady drift makes the second arm of each block slower, and nothing else: ABBA cancels it, and the error must not hold it."""
    first = np.arange(8) % 2 == 0
    baseline = np.where(first, 1.0, 1.1)
    other = np.where(first, 1.1, 1.0)
    estimate = log_ratio(baseline, other, Design(np.arange(8), first))
    assert estimate.value == pytest.approx(0.0)
    assert estimate.standard_error == pytest.approx(0.0, abs=1e-12)
    assert log_ratio(baseline, other, Design(np.arange(8), np.ones(8, bool))).standard_error > 0.01  # nobody said who was first


def test_one_block_knows_no_error() -> None:
    estimate = log_ratio(np.array([2.0, 3.0]), np.array([1.0, 1.0]), Design(np.zeros(2, np.intp), np.array([True])))
    assert np.isinf(estimate.standard_error)


def test_many_data_sets_at_once_are_as_each_alone() -> None:
    runs = paired_seconds(np.random.default_rng(2), 5, 8, Noise(), 1.1)
    together = log_ratio(runs.baseline_s, runs.speculative_s, runs.design)
    for run in range(5):
        alone = log_ratio(runs.baseline_s[run], runs.speculative_s[run], runs.design)
        assert together.value[run] == pytest.approx(alone.value)
        assert together.standard_error[run] == pytest.approx(alone.standard_error)
