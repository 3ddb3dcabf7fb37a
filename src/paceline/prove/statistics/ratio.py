"""A ratio of totals over pairs in blocks: its logarithm, what each pair contributes, and its standard error over blocks.

The ratio is (sum of the baseline's seconds) / (sum of the other's), never a mean of ratios: a mean of ratios weighs a one-token answer like
an answer of a thousand tokens and is above 1 under pure noise. Leading axes of all arrays are independent data sets of the same design.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.prove.statistics.student import Floats

Ints = NDArray[np.intp]

MIN_BLOCKS_FOR_ORDER = 6  # with fewer, one more degree of freedom costs more than the effect of order does

# What slows a machine outlasts a run, so neighbouring blocks are alike even in their differences, which alternate as ABBA. Half of the
# covariance of neighbours is in the estimate (Newey and West, one lag: never negative); this is the allowance for the rest. Eight blocks
# are too few to estimate more: without both, noise that lasts about a run was measured to leave 91 % coverage of a 95 % interval.
SERIAL_ALLOWANCE = 1.10


@dataclass(frozen=True, slots=True)
class Design:
    """Which block each pair lies in, and which arm ran first there."""

    block: Ints  # [num_pairs], in 0..num_blocks-1; every block has a pair
    baseline_first: NDArray[np.bool_]  # [num_blocks]

    @property
    def num_blocks(self) -> int:
        return len(self.baseline_first)

    @property
    def order(self) -> Floats | None:
        """The contrast of the two orders [num_blocks], centred; None where it is not to be taken out.

        A drift makes the arm that runs second slower in every block, which ABBA cancels in the total but not in the spread.
        """
        num_first = int(self.baseline_first.sum())
        if self.num_blocks < MIN_BLOCKS_FOR_ORDER or min(num_first, self.num_blocks - num_first) < 2:
            return None
        sign = np.where(self.baseline_first, 1.0, -1.0)
        return sign - sign.mean()

    @property
    def df(self) -> int:
        """Degrees of freedom of the spread between blocks; below 1 there is none."""
        return self.num_blocks - (1 if self.order is None else 2)

    def sums(self, per_pair: Floats) -> Floats:
        """Of each block: [..., num_pairs] -> [..., num_blocks]."""
        indicator = np.zeros((len(self.block), self.num_blocks))
        indicator[np.arange(len(self.block)), self.block] = 1.0
        return per_pair @ indicator


@dataclass(frozen=True, slots=True)
class LogRatio:
    """The logarithm of a ratio of totals. Infinite standard error: too few blocks to know one."""

    value: Floats  # [...]
    influence: Floats  # [..., num_pairs]: the derivative of `value` by the weight of a pair; sums to 0
    standard_error: Floats  # [...]
    design: Design


def log_ratio(baseline: Floats, speculative: Floats, design: Design) -> LogRatio:
    """log(sum of `baseline` / sum of `speculative`), both [..., num_pairs] and above 0: seconds over the same tokens."""
    value, influence = _log_ratio(baseline, speculative)
    return _with_error(value, influence, design)


def log_ratio_per_token(baseline: tuple[Floats, Floats], speculative: tuple[Floats, Floats], design: Design) -> LogRatio:
    """The same of seconds per token: each arm gives (seconds, tokens), for answers that differ in length."""
    seconds, by_seconds = _log_ratio(baseline[0], speculative[0])
    tokens, by_tokens = _log_ratio(baseline[1], speculative[1])
    return _with_error(seconds - tokens, by_seconds - by_tokens, design)


def _log_ratio(above: Floats, below: Floats) -> tuple[Floats, Floats]:
    total_above, total_below = above.sum(-1, keepdims=True), below.sum(-1, keepdims=True)
    return np.log(total_above / total_below)[..., 0], above / total_above - below / total_below


def _with_error(value: Floats, influence: Floats, design: Design) -> LogRatio:
    residual = without_order(design.sums(influence), design.order)
    return LogRatio(value, influence, spread(residual, design), design)


def without_order(per_block: Floats, order: Floats | None) -> Floats:
    """[..., num_blocks] less what the order of the arms explains."""
    if order is None:
        return per_block
    return per_block - (per_block @ order)[..., None] * (order / (order @ order))


def spread(residual: Floats, design: Design) -> Floats:
    """The standard error of a sum over blocks, from residuals [..., num_blocks] of mean 0, blocks in the order of time."""
    if design.df < 1:
        return np.full(residual.shape[:-1], np.inf)
    variance = (residual**2).sum(-1) + (residual[..., 1:] * residual[..., :-1]).sum(-1)
    return np.sqrt(np.maximum(variance, 0.0) * (design.num_blocks / design.df) * SERIAL_ALLOWANCE)
