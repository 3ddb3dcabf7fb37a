"""Chi-square tests of counts, their p-values, and Holm's thresholds. Pure; called by `law_tests.py`.

The incomplete gamma function is computed by its series and its continued fraction (Abramowitz and Stegun 6.5.29 and 6.5.31).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_EXPECTED = 5.0
"""Bins with fewer expected counts are pooled: the usual condition for chi-square's law to hold."""
_FORBIDDEN_SHARE = 1e-6
"""Expected share of outcomes that cannot be: a single one is far beyond any threshold, and the statistic stays finite."""
_MAX_TERMS = 100_000


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic with its degrees of freedom; those of independent tables add up."""

    statistic: float = 0.0
    num_degrees: int = 0

    def __add__(self, other: "ChiSquare") -> "ChiSquare":
        return ChiSquare(self.statistic + other.statistic, self.num_degrees + other.num_degrees)

    @property
    def p(self) -> float:
        """Chance of a statistic at least as large; 1 without degrees of freedom."""
        return upper_gamma(self.num_degrees / 2, self.statistic / 2) if self.num_degrees else 1.0


def goodness_of_fit(observed: Sequence[int], probs: Sequence[float], num_forbidden: int = 0) -> ChiSquare:
    """Counts of one table against probabilities that sum to 1; `num_forbidden` more were seen of what has probability 0."""
    counts, expected = np.array(observed, dtype=np.float64), np.array(probs, dtype=np.float64) * (sum(observed) + num_forbidden)
    counts, expected = _pooled(counts, expected)
    result = ChiSquare(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1) if len(counts) > 1 else ChiSquare()
    if num_forbidden:
        floor = _FORBIDDEN_SHARE * (sum(observed) + num_forbidden)
        result += ChiSquare(num_forbidden**2 / floor, 1)
    return result


def homogeneity(first: Sequence[int], second: Sequence[int]) -> ChiSquare:
    """Two samples over the same outcomes: do they come from one law?"""
    table = np.array([first, second], dtype=np.float64)
    shares = table.sum(1) / table.sum()
    smallest = float(shares.min())
    if smallest == 0:
        return ChiSquare()
    pooled = [_pooled(row, table.sum(0) * smallest)[0] for row in table]
    table = np.stack(pooled)
    if table.shape[1] < 2:
        return ChiSquare()
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return ChiSquare(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def holm_thresholds(ps: Sequence[float], alpha: float) -> tuple[float, ...]:
    """What each p must be below to be rejected, with chance `alpha` of any false rejection (Holm 1979).

    A test behind one that is not rejected gets the threshold of that one, below which its p cannot be.
    """
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    thresholds = [0.0] * len(ps)
    stopped: float | None = None
    for rank, index in enumerate(order):
        threshold = alpha / (len(ps) - rank) if stopped is None else stopped
        thresholds[index] = threshold
        if stopped is None and ps[index] >= threshold:
            stopped = threshold
    return tuple(thresholds)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x) for a > 0, x >= 0; relative error about 1e-12."""
    assert a > 0
    assert x >= 0
    if x == 0:
        return 1.0
    front = a * math.log(x) - x - math.lgamma(a)
    if front < -745:  # smaller than any float
        return 0.0 if x > a else 1.0
    return 1.0 - _lower_series(a, x, front) if x < a + 1 else _upper_fraction(a, x, front)


def _lower_series(a: float, x: float, front: float) -> float:
    term = total = 1.0 / a
    for n in range(1, _MAX_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * 1e-16:
            break
    return total * math.exp(front)


def _upper_fraction(a: float, x: float, front: float) -> float:
    """By Lentz's method."""
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    value = d
    for n in range(1, _MAX_TERMS):
        an = -n * (n - a)
        b += 2
        d = an * d + b
        c = b + an / c
        d = 1 / (d if abs(d) > tiny else tiny)
        c = c if abs(c) > tiny else tiny
        delta = d * c
        value *= delta
        if abs(delta - 1) < 1e-15:
            break
    return value * math.exp(front)


def _pooled(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both with all small bins as one, and that one with the next if it is still too small."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    num_small = int((expected < MIN_EXPECTED).sum())
    if num_small == 0:
        return counts, expected
    while num_small < len(expected) and expected[:num_small].sum() < MIN_EXPECTED:
        num_small += 1
    head = slice(0, num_small)
    return np.append(counts[num_small:], counts[head].sum()), np.append(expected[num_small:], expected[head].sum())
