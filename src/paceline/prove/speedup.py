"""Comparisons -> speed-ups with their intervals, and the primary endpoints. For `verdict.py`.

The ratio of the mix is total wall time of the baseline's blocks over that of the same blocks accelerated; of a category, total time of its
requests, for requests of several categories share a block's wall time. Answers of unequal length are compared per token (`Work`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.prove.latency import e2e_s
from paceline.prove.pairing import Comparison, Pair, PairedBlock
from paceline.prove.record import Arm
from paceline.prove.results import OVERALL, Speedup, Work
from paceline.prove.statistics.bootstrap import (
    Multipliers,
    SimultaneousBounds,
    draw_multipliers,
    one_sided_low,
    simultaneous,
    t_draws,
    tail_probability,
    two_sided,
)
from paceline.prove.statistics.holm import holm_levels
from paceline.prove.statistics.ratio import Design, LogRatio, log_ratio, log_ratio_per_token
from paceline.prove.statistics.student import Floats
from paceline.prove.summary import mean_user_tps, projected_ratio

PRIMARY_ALPHA = 0.025  # one-sided, so that one primary endpoint alone is judged by the lower end of its 95 % interval


@dataclass(frozen=True, slots=True)
class Cell:
    """One ratio with its bootstrap draws."""

    category: str
    comparison: Comparison
    pairs: tuple[Pair, ...]
    estimate: LogRatio
    draws: Floats  # [num_draws]

    @property
    def ratio(self) -> float:
        return float(np.exp(self.estimate.value))

    @property
    def standard_error(self) -> float:
        """Of the ratio's logarithm."""
        return float(self.estimate.standard_error)

    @property
    def num_blocks(self) -> int:
        return self.estimate.design.num_blocks

    @property
    def name(self) -> str:
        return f"{self.category} at concurrency {self.comparison.concurrency}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The mix at one concurrency, tested against "not faster" under Holm's procedure."""

    cell: Cell
    low: float  # lower bound at its level
    level: float
    is_faster: bool


@dataclass(frozen=True, slots=True)
class SpeedAnalysis:
    cells: tuple[Cell, ...]
    endpoints: tuple[Endpoint, ...]
    bounds: SimultaneousBounds  # in the order of the cells
    speedup: tuple[Speedup, ...]


def analyse(comparisons: Sequence[Comparison], num_draws: int, seed: int) -> SpeedAnalysis:
    """Every cell of every concurrency that has a block to compare. The same records and seed give the same numbers."""
    cells: list[Cell] = []
    for comparison in comparisons:
        if comparison.blocks:
            cells += _cells(comparison, num_draws, np.random.default_rng([seed, comparison.concurrency]))
    bounds = simultaneous([(cell.estimate, cell.draws) for cell in cells])
    speedup = tuple(_speedup(cell, low, high) for cell, low, high in zip(cells, bounds.low, bounds.high, strict=True))
    return SpeedAnalysis(tuple(cells), endpoints([cell for cell in cells if cell.category == OVERALL]), bounds, speedup)


def endpoints(mixes: Sequence[Cell]) -> tuple[Endpoint, ...]:
    """Holm's steps: from the smallest p on, a lower bound at its level; after the first that is not above 1, none counts as faster."""
    p_values = [float(tail_probability(cell.estimate, cell.draws)) for cell in mixes]
    levels = holm_levels(p_values, PRIMARY_ALPHA)
    found: dict[int, Endpoint] = {}
    is_open = True
    for index in sorted(range(len(mixes)), key=lambda index: p_values[index]):
        low = float(one_sided_low(mixes[index].estimate, mixes[index].draws, levels[index]))
        is_open = is_open and low > 1.0
        found[index] = Endpoint(mixes[index], low, levels[index], is_open)
    return tuple(found[index] for index in range(len(mixes)))


def _cells(comparison: Comparison, num_draws: int, rng: np.random.Generator) -> list[Cell]:
    """Categories, then the mix. All share the multipliers of blocks, so that what hits a block hits all its cells together."""
    pairs = [pair for block in comparison.blocks for pair in block.pairs]
    block_of = np.array([index for index, block in enumerate(comparison.blocks) for _ in block.pairs], dtype=np.intp)
    first = np.array([block.is_baseline_first for block in comparison.blocks])
    multipliers = draw_multipliers(Design(block_of, first), num_draws, rng)
    is_same_length = comparison.work is not Work.PER_TOKEN
    cells: list[Cell] = []
    for category in comparison.categories:
        chosen = [index for index, pair in enumerate(pairs) if pair[0].category == category]
        mine = np.array(chosen, dtype=np.intp)
        blocks, local = np.unique(block_of[mine], return_inverse=True)
        design = Design(local.astype(np.intp), first[blocks])
        own = tuple(pairs[index] for index in chosen)
        estimate = _estimate(_request_numbers(own), design, is_same_length)
        cells.append(Cell(category, comparison, own, estimate, t_draws(estimate, multipliers.at(mine, blocks))))
    every_block = np.arange(len(first), dtype=np.intp)
    estimate = _estimate(_block_numbers(comparison.blocks), Design(every_block, first), is_same_length)
    of_mix = Multipliers(multipliers.of_blocks, np.ones((num_draws, len(first)), dtype=np.int8))  # a block's wall time is one number
    cells.append(Cell(OVERALL, comparison, tuple(pairs), estimate, t_draws(estimate, of_mix)))
    return cells


def _request_numbers(pairs: Sequence[Pair]) -> Floats:
    """[2 arms, seconds and tokens, num_pairs]."""
    return np.array(
        [[[e2e_s(pair[side]) for pair in pairs], [pair[side].num_output_tokens for pair in pairs]] for side in (0, 1)], dtype=np.float64
    )


def _block_numbers(blocks: Sequence[PairedBlock]) -> Floats:
    return np.array(
        [[[block.wall_s(arm) for block in blocks], [block.num_tokens(arm) for block in blocks]] for arm in Arm], dtype=np.float64
    )


def _estimate(numbers: Floats, design: Design, is_same_length: bool) -> LogRatio:
    (base_s, base_tokens), (other_s, other_tokens) = numbers
    if is_same_length or not base_tokens.sum() or not other_tokens.sum():
        return log_ratio(base_s, other_s, design)
    return log_ratio_per_token((base_s, base_tokens), (other_s, other_tokens), design)


def _speedup(cell: Cell, low: float | None, high: float | None) -> Speedup:
    baseline, speculative = [pair[0] for pair in cell.pairs], [pair[1] for pair in cell.pairs]
    user = mean_user_tps(baseline), mean_user_tps(speculative)
    interval = two_sided(cell.estimate, cell.draws)
    return Speedup(
        category=cell.category,
        concurrency=cell.comparison.concurrency,
        ratio=cell.ratio,
        user_tps_ratio=user[1] / user[0] if user[0] and user[1] else None,
        output_tps_ratio=_output_tps_ratio(cell.comparison.blocks) if cell.category == OVERALL else None,
        ci95=(float(interval[0]), float(interval[1])),
        simultaneous_low=low,
        simultaneous_high=high,
        projected_ratio=projected_ratio(baseline, speculative),
        num_pairs=len(cell.pairs),
        work=cell.comparison.work,
    )


def _output_tps_ratio(blocks: Sequence[PairedBlock]) -> float | None:
    speed = {arm: sum(block.num_tokens(arm) for block in blocks) / sum(block.wall_s(arm) for block in blocks) for arm in Arm}
    return speed[Arm.SPECULATIVE] / speed[Arm.BASELINE] if speed[Arm.BASELINE] else None
