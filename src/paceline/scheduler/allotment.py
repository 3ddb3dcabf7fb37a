"""Divides drafts among the rows of one step: (row, position) pairs by survival probability, as long as tokens per second rise.

Pure arithmetic on estimates; the draft length policy calls it. Source of the objective: goodput as in Liu et al. 2024, "Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput", section 4; the condition on every row is added here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_ROW_SPEED = 0.99
"""Of its plain speed, what every row of the step must be expected to keep."""

_LEAST_SURVIVAL = 0.03  # drafts less likely to stand than this are not worth the arithmetic

Cost = Callable[[int], float]
"""Milliseconds by a number: the target's by its tokens, the drafter's by its longest draft."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row as the division sees it."""

    survival: Sequence[float]  # of each position that the row may use; empty for a row that gets no drafts
    propensity: float = 1.0  # how often the drafter drafts when it may


@dataclass(frozen=True, slots=True)
class Allotment:
    """The best division found. `speed`: tokens per second as a multiple of plain decoding, 1 without drafts."""

    lengths: tuple[int, ...]
    speed: float
    is_held_by_row: bool = False  # a faster division exists, at the cost of a row


def divide(candidates: Sequence[Candidate], target_ms: Cost, drafter_ms: Cost, plain_ms: float, max_drafts: int) -> Allotment:
    """The division with the most tokens per second among those in which every row keeps MIN_ROW_SPEED; O(pairs x log pairs)."""
    num_rows = len(candidates)
    pairs = sorted((-alive, position, row) for row, candidate in enumerate(candidates) for position, alive in enumerate(candidate.survival))
    expected = [1.0] * num_rows
    lengths = [0] * num_rows
    total, num_likely, longest = float(num_rows), 0.0, 0
    best, best_any = 1.0, 1.0
    best_count = 0
    for count, (negative, position, row) in enumerate(pairs[:max_drafts], start=1):
        if -negative < _LEAST_SURVIVAL:
            break
        propensity = candidates[row].propensity
        lengths[row] = position + 1
        longest = max(longest, position + 1)
        expected[row] -= negative * propensity
        total -= negative * propensity
        num_likely += propensity
        # The pass is either plain or has all the drafts; with several rows that draft now and then, the truth lies on a line between.
        # The drafter takes its time whether or not it comes back with something.
        slowdown = 1 + num_likely / count * (target_ms(num_rows + count) / plain_ms - 1) + drafter_ms(longest) / plain_ms
        speed = total / num_rows / slowdown
        if speed <= best:
            continue
        best_any = max(best_any, speed)
        if _keeps_every_row(expected, slowdown):
            best, best_count = speed, count
    chosen = [0] * num_rows
    for _, position, row in pairs[:best_count]:
        chosen[row] = position + 1
    return Allotment(tuple(chosen), best, best_any > best)


def _keeps_every_row(expected: Sequence[float], slowdown: float) -> bool:
    return min(expected) >= MIN_ROW_SPEED * slowdown
