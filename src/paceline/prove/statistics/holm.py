"""Holm's step-down procedure (1979): several claims, with the chance of any false one bounded. Used for the primary endpoints."""

from collections.abc import Sequence


def holm_levels(p_values: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The level that each claim is tested at: alpha / (number of claims not smaller in p than it)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    levels = [0.0] * len(p_values)
    for rank, index in enumerate(order):
        levels[index] = alpha / (len(p_values) - rank)
    return tuple(levels)


def holm(p_values: Sequence[float], alpha: float) -> tuple[bool, ...]:
    """Which claims stand: from the smallest p on, until one exceeds its level; none after that stands."""
    levels = holm_levels(p_values, alpha)
    stands = [False] * len(p_values)
    for index in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        if p_values[index] > levels[index]:
            break
        stands[index] = True
    return tuple(stands)
