"""From triples of blocks (speculative, control, speculative) to a speed-up with its interval, by range of batch and context.

Filled by `switchback.py`. Memory and time are bounded: the last triples of each band count, and an interval is made anew only for them.
"""

from collections import deque
from dataclasses import dataclass, field
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from paceline.core.stats import Speedup

MIN_TRIPLES = 30
"""Below this an interval says more of its own uncertainty than of the speed-up."""
MAX_TRIPLES = 128
_NUM_RESAMPLES = 500
_Z = 1.959964  # of 95 %, two-sided


@dataclass(frozen=True, slots=True)
class Triple:
    """A block of plain steps and the two speculative blocks around it, of the same rows. Times are rows x seconds."""

    band: str
    num_speculative_tokens: int  # committed in both speculative blocks
    speculative_row_s: float
    num_control_tokens: int
    control_row_s: float


@dataclass(slots=True)
class _Band:
    triples: deque[Triple] = field(default_factory=lambda: deque[Triple](maxlen=MAX_TRIPLES))
    speedup: Speedup | None = None
    is_stale: bool = False  # triples have come since `speedup` was made


class SpeedupEstimator:
    """Keeps the last MAX_TRIPLES triples of each band."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._bands: dict[str, _Band] = {}

    def add(self, triple: Triple) -> None:
        band = self._bands.setdefault(triple.band, _Band())
        band.triples.append(triple)
        band.is_stale = len(band.triples) >= MIN_TRIPLES

    def speedups(self) -> tuple[Speedup, ...]:
        """Of the bands with MIN_TRIPLES or more. Makes at most one interval anew, about a millisecond; the others follow at later calls."""
        stale = next(((name, band) for name, band in self._bands.items() if band.is_stale), None)
        if stale is not None:
            name, band = stale
            band.speedup = speedup(name, tuple(band.triples), self._random)
            band.is_stale = False
        return tuple(band.speedup for band in self._bands.values() if band.speedup is not None)


def speedup(band: str, triples: tuple[Triple, ...], random: np.random.Generator) -> Speedup:
    """Committed tokens per row-second, speculative over control: a ratio of sums, so that a stall weighs the same on either side.

    The interval is a bootstrap over triples with random weights instead of random draws (Rubin 1981, "The Bayesian Bootstrap"), widened
    to what as few triples need (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 3.3).
    """
    sums = np.array([(t.num_speculative_tokens, t.speculative_row_s, t.num_control_tokens, t.control_row_s) for t in triples])
    log_ratio = float(_log_ratio(sums.sum(axis=0)))
    weights = random.standard_exponential((_NUM_RESAMPLES, len(triples)))
    quantiles = np.quantile(_log_ratio((weights @ sums).T), (0.025, 0.975))
    low, high = (exp(log_ratio + (float(quantile) - log_ratio) * _widening(len(triples))) for quantile in quantiles)
    return Speedup(band, exp(log_ratio), low, high, len(triples))


def _log_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    speculative_tokens, speculative_row_s, control_tokens, control_row_s = sums
    return np.log(speculative_tokens * control_row_s / (speculative_row_s * control_tokens))


def _widening(num_triples: int) -> float:
    """What turns quantiles of the resamples into those of Student's t with a variance that is not too small."""
    degrees = num_triples - 1
    t = _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)  # to 1e-4 from 30 triples on
    return t / _Z * sqrt((num_triples + 1) / degrees)
