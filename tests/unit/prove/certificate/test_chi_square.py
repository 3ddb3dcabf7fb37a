import numpy as np
import pytest
from scipy import special, stats

from paceline.prove.certificate.chi_square import ChiSquare, goodness_of_fit, holm_thresholds, homogeneity, upper_gamma


@pytest.mark.parametrize("a", [0.5, 1, 2.5, 7, 40, 500])
def test_the_incomplete_gamma_function_is_scipys(a: float) -> None:
    for x in (0, 1e-9, 0.3, 1, a - 0.4, a, a + 1, a + 1.1, 3 * a, 60, 700):
        assert upper_gamma(a, x) == pytest.approx(special.gammaincc(a, x), rel=1e-10, abs=1e-300), (a, x)
    assert upper_gamma(a, 1e6) == 0


def test_a_table_with_large_bins_is_scipys() -> None:
    observed, probs = [30, 52, 18], [0.3, 0.45, 0.25]
    ours, theirs = goodness_of_fit(observed, probs), stats.chisquare(observed, [30, 45, 25])
    assert (ours.statistic, ours.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    two, other = homogeneity([30, 52, 18], [20, 40, 40]), stats.chi2_contingency([[30, 52, 18], [20, 40, 40]])
    assert (two.statistic, two.p, two.num_degrees) == pytest.approx((other.statistic, other.pvalue, other.dof))


def test_small_bins_are_one() -> None:
    """2 + 1 + 3 expected counts are one bin of 6."""
    assert goodness_of_fit([50, 44, 2, 1, 3], [0.5, 0.44, 0.02, 0.01, 0.03]).num_degrees == 2
    # 2 expected are too few for a bin of their own, and join the next.
    assert goodness_of_fit([50, 48, 2], [0.5, 0.48, 0.02]).num_degrees == 1
    assert goodness_of_fit([3], [1.0]) == ChiSquare()
    assert goodness_of_fit([3], [1.0]).p == 1
    assert homogeneity([4, 4], [0, 0]) == ChiSquare()


def test_what_cannot_be_is_enough_once() -> None:
    assert goodness_of_fit([50, 49], [0.5, 0.5], num_forbidden=1).p < 1e-12
    assert goodness_of_fit([99], [1.0], num_forbidden=1).p < 1e-12


def test_p_values_of_lawful_samples_are_uniform() -> None:
    rng = np.random.default_rng(1)
    probs = [0.4, 0.25, 0.2, 0.1, 0.03, 0.02]
    ps = [goodness_of_fit([int(n) for n in rng.multinomial(200, probs)], probs).p for _ in range(1000)]
    assert stats.kstest(ps, "uniform").pvalue > 1e-3


def test_holms_thresholds() -> None:
    assert holm_thresholds([0.5, 0.001, 0.02, 0.013], 0.05) == (0.05, 0.0125, 0.025, 0.05 / 3)
    # The least p stops it, so nobody gets more room.
    assert holm_thresholds([0.03, 0.02], 0.02) == (0.01, 0.01)
    assert holm_thresholds([], 0.05) == ()
