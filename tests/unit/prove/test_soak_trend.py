"""Planted slopes are found, and noise of every usual kind is not taken for one."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceline.prove.soak_trend import Limit, fit_trend, t_quantile

RSS = Limit("rss_mib", +1, per_hour=2.0, least=16.0)
TIMES_S = np.arange(0, 1800, 6.0)


def alike(rng: np.random.Generator, r: float, scale: float) -> NDArray[np.float64]:
    """AR(1) noise."""
    noise = np.zeros(len(TIMES_S))
    for index in range(1, len(noise)):
        noise[index] = r * noise[index - 1] + rng.normal(0, scale)
    return noise


def test_a_planted_slope_is_measured() -> None:
    rng = np.random.default_rng(0)
    trend = fit_trend(TIMES_S, 500 + 100 * TIMES_S / 3600 + rng.normal(0, 5, len(TIMES_S)), RSS)
    assert trend is not None
    assert trend.low < 100 < trend.high
    assert trend.high - trend.low < 25
    assert trend.is_leak
    assert trend.bound == pytest.approx(16 / (TIMES_S[-1] / 3600)), "a half hour's soak calls 16 MiB in all no leak"


@pytest.mark.parametrize("r", [0.0, 0.8, 0.95])
def test_its_interval_holds_the_truth_and_noise_is_no_leak(r: float) -> None:
    rng = np.random.default_rng(int(100 * r))
    num_runs, num_covered, num_false = 100, 0, 0
    for _ in range(num_runs):
        values = 500 + 20 * TIMES_S / 3600 + alike(rng, r, 8.0)
        values[rng.integers(len(values), size=5)] += 200  # a spike is no growth
        trend = fit_trend(TIMES_S, values, RSS)
        assert trend is not None
        num_covered += trend.low <= 20 <= trend.high
        num_false += trend.is_leak
    assert num_covered >= 0.95 * num_runs
    assert num_false <= 0.02 * num_runs


def test_a_figure_that_stands_still_has_an_exact_trend() -> None:
    trend = fit_trend(TIMES_S, np.full(len(TIMES_S), 40.0), Limit("num_fds", +1, 1.0, 8.0))
    assert trend is not None
    assert (trend.per_hour, trend.low, trend.high) == pytest.approx((0, 0, 0), abs=1e-9)
    assert trend.is_leak is False


def test_a_loss_is_a_leak_in_the_other_direction() -> None:
    loss = Limit("num_free_pages", -1, 1.0, 4.0)
    falling = fit_trend(TIMES_S, 1000 - TIMES_S / 10, loss)
    rising = fit_trend(TIMES_S, 1000 + TIMES_S / 10, loss)
    assert falling is not None and rising is not None
    assert (falling.is_leak, rising.is_leak) == (True, False)


def test_growth_that_has_ended_is_no_leak() -> None:
    """A cache that fills and is full."""
    values = 500 + 60 * np.minimum(TIMES_S / 300, 1.0)
    trend = fit_trend(TIMES_S, values, RSS)
    assert trend is not None
    assert not trend.is_leak


def test_too_little_is_no_trend() -> None:
    assert fit_trend([0, 1, 2], [1, 2, 3], RSS) is None
    assert fit_trend([5] * 20, list(range(20)), RSS) is None


def test_students_quantile() -> None:
    for num_degrees in (3, 4, 6, 10, 30, 300):
        assert t_quantile(num_degrees) == pytest.approx(stats.t.ppf(0.995, num_degrees), rel=0.02)
    assert t_quantile(1) > 2 * t_quantile(3)
