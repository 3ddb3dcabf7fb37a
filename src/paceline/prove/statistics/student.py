"""Student's and the normal law, for whole degrees of freedom, vectorised; so that prove needs no scipy."""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_BISECTIONS = 80


def student_tail(t: Floats, df: int) -> Floats:
    """P(T > t) for `t` of any shape (infinities included) and df >= 1; Abramowitz and Stegun, formulas 26.7.3 and 26.7.4.

    The sums are finite and exact, but the tail is a difference from 1/2: below about 1e-14 it is 0.
    """
    assert df >= 1
    with np.errstate(invalid="ignore"):
        theta = np.arctan(np.asarray(t, dtype=np.float64) / math.sqrt(df))
    sine, cosine = np.sin(theta), np.cos(theta)
    term = cosine.copy() if df % 2 else np.ones_like(cosine)
    total = term.copy()
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term = term * cosine * cosine * ((k - 1) / k)
        total += term
    if df % 2:
        inside = (theta + (sine * total if df > 1 else 0.0)) * (2 / math.pi)
    else:
        inside = sine * total
    return np.clip((1.0 - inside) / 2, 0.0, 1.0)


@lru_cache(maxsize=4096)  # cells of one design ask for the same one
def student_quantile(tail: float, df: int) -> float:
    """The t that is exceeded with probability `tail`, in (0, 0.5]; infinite where that cannot be told from 0."""
    assert 0.0 <= tail <= 0.5
    if tail < 1e-13:
        return math.inf
    low, high = 0.0, 1.0
    while float(student_tail(np.array(high), df)) > tail:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float(student_tail(np.array(middle), df)) > tail:
            low = middle
        else:
            high = middle
    return high


def normal_quantile(tail: float) -> float:
    """The z that a standard normal number exceeds with probability `tail`."""
    return _NORMAL.inv_cdf(1.0 - tail)
