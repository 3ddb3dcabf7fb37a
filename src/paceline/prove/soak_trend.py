"""Does a figure grow? A line through its values over time, with an interval that knows that neighbours are alike. Pure.

Least squares on the medians of windows; the standard error is widened for first-order autocorrelation of the residuals, as if
there were n (1 - r) / (1 + r) values (Bayley and Hammersley 1946). Called by `soak.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.prove.soak_plan import Trend

MIN_WINDOWS = 8
MAX_WINDOWS = 120
_Z_99 = 2.5758293035489004  # two-sided
_MAX_AUTOCORRELATION = 0.95


@dataclass(frozen=True, slots=True)
class Limit:
    """What is a leak of one figure: a slope beyond the bound with its whole interval."""

    name: str
    direction: int  # +1: growth is bad, -1: loss is
    per_hour: float
    least: float  # less change than this over the whole soak is no leak, however straight


def fit_trend(times_s: Sequence[float], values: Sequence[float], limit: Limit) -> Trend | None:
    """The trend of values at rising times; None for fewer than MIN_WINDOWS of them."""
    if len(times_s) < MIN_WINDOWS or times_s[-1] <= times_s[0]:
        return None
    hours, medians = _windows(np.array(times_s) / 3600, np.array(values, dtype=np.float64))
    slope, half = _slope(hours, medians)
    span = float(times_s[-1] - times_s[0]) / 3600
    bound = limit.direction * max(limit.per_hour, limit.least / span)
    low, high = slope - half, slope + half
    is_leak = low > bound if limit.direction > 0 else high < bound
    return Trend(limit.name, slope, low, high, bound, bool(is_leak), len(hours))


def _windows(hours: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Medians of windows with equally many values, and their mean times."""
    num_windows = min(MAX_WINDOWS, max(MIN_WINDOWS, len(hours) // 4))
    windows = list(zip(np.array_split(hours, num_windows), np.array_split(values, num_windows), strict=True))
    return np.array([float(times.mean()) for times, _ in windows]), np.array([float(np.median(part)) for _, part in windows])


def _slope(hours: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Slope per hour and half of its 99 % interval."""
    n = len(hours)
    centred = hours - hours.mean()
    spread = float((centred**2).sum())
    slope = float((centred * values).sum()) / spread
    residuals = values - values.mean() - slope * centred
    total = float((residuals**2).sum())
    if total == 0:
        return slope, 0.0
    found = float((residuals[1:] * residuals[:-1]).sum()) / total
    # Residuals of a fitted line look less alike than the errors are.
    autocorrelation = min(max(found + (1 + 4 * max(found, 0.0)) / n, 0.0), _MAX_AUTOCORRELATION)
    num_effective = n * (1 - autocorrelation) / (1 + autocorrelation)
    variance = total / max(num_effective - 2, 1.0)
    return slope, t_quantile(max(num_effective - 2, 1.0)) * math.sqrt(variance / spread)


def t_quantile(num_degrees: float) -> float:
    """Student's 99.5 % quantile; within 2 % from 3 degrees of freedom on, and below that the one of 3, twofold for each that is missing.

    Source: the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    n, z = max(num_degrees, 3.0), _Z_99
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile = z + sum(term / n**power for power, term in enumerate(terms, 1))
    return quantile * 2 ** max(3 - num_degrees, 0.0)
