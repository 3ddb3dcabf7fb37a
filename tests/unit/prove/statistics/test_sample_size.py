"""The number of blocks that is promised to be enough, tried out."""

import numpy as np
import pytest
from scipy import stats

from paceline.prove.statistics.sample_size import POWER, blocks_needed


def test_as_many_blocks_as_planned_find_the_effect_in_four_of_five_runs() -> None:
    spread, effect, alpha = 0.1, 0.05, 0.025
    needed = blocks_needed(effect, spread / np.sqrt(8), 8, alpha)
    assert needed is not None
    rng = np.random.default_rng(0)
    draws = effect + spread * rng.standard_normal((20_000, needed))
    low = draws.mean(1) - stats.t.isf(alpha, needed - 2) * draws.std(1, ddof=1) / np.sqrt(needed)
    assert (low > 0).mean() == pytest.approx(POWER, abs=0.03)


def test_no_number_of_blocks_helps_an_estimate_on_the_wrong_side() -> None:
    assert blocks_needed(-0.01, 0.1, 8, 0.05) is None
    assert blocks_needed(0.0, 0.1, 8, 0.05) is None
    assert blocks_needed(0.01, float("inf"), 1, 0.05) is None
