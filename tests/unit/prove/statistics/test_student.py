"""The laws against scipy's, which only tests may use."""

import math

import numpy as np
import pytest
from scipy import stats

from paceline.prove.statistics.student import normal_quantile, student_quantile, student_tail


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 6, 14, 15, 62])
def test_student_tail_and_quantile_are_scipys(df: int) -> None:
    t = np.array([-np.inf, -3.0, -0.5, 0.0, 0.7, 2.0, 8.0, np.inf])
    np.testing.assert_allclose(student_tail(t, df), stats.t.sf(t, df), atol=1e-12)
    for tail in (0.5, 0.3, 0.05, 0.001, 1e-6):
        assert student_quantile(tail, df) == pytest.approx(stats.t.isf(tail, df), rel=1e-6, abs=1e-9)


def test_a_tail_of_nothing_is_never_reached() -> None:
    assert student_quantile(0.0, 5) == math.inf


def test_normal_quantile_is_scipys() -> None:
    assert normal_quantile(0.025) == pytest.approx(stats.norm.isf(0.025))
