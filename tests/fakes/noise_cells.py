"""Exact integration of the sampler's law over its uniforms, with the production code as the integrand.

Under `ratio` each draw is one uniform, named by (seed, output index, purpose), and decides by comparing it with sums of probabilities.
So the output is piecewise constant on a grid of boxes in the cube of all uniforms. `NoiseCells` finds the boxes: it runs one point of
every box, sees which thresholds the point was compared with, and splits a box that a threshold cuts, until none does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.speculative import verify as verify_module
from paceline.speculative.noise import Purpose

_TAG_BITS = 26  # low bits of a point's mantissa that carry its address; they move it by less than 1e-8
_NUM_PURPOSES = len(Purpose)
_TOLERANCE = 1e-12


@dataclass
class _Comparison:
    """Uniforms, by box and axis, met thresholds `[n, m]`."""

    box: NDArray[np.int64]
    axis: NDArray[np.int64]
    thresholds: NDArray[np.float64]


class NoiseCells:
    """The boxes still to be split. Row i of a batch uses seed i, which stands for box i."""

    def __init__(self, num_indexes: int) -> None:
        self.num_axes = num_indexes * _NUM_PURPOSES
        assert self.num_axes < 64
        self.low = np.zeros((1, self.num_axes))
        self.high = np.ones((1, self.num_axes))
        self.comparisons: list[_Comparison] = []
        self.step_start = torch.zeros(1, dtype=torch.int64)  # output index at which the running step began, by box

    def uniforms(self, seed: torch.Tensor, index: torch.Tensor, purpose: int) -> torch.Tensor:
        """Stands in for `noise.uniforms`: the middle of the box, tagged with its address."""
        box = seed.numpy()
        axis = index.numpy() * _NUM_PURPOSES + int(purpose)
        middle = np.ascontiguousarray((self.low[box, axis] + self.high[box, axis]) / 2).view(np.int64)
        tagged = (middle >> _TAG_BITS << _TAG_BITS) | (box << 6) | axis
        return torch.from_numpy(tagged.view(np.float64).copy())

    def record(self, uniform: torch.Tensor, thresholds: torch.Tensor) -> None:
        """Note that `uniform` `[n]` was compared with `thresholds` `[n, m]`."""
        tag = uniform.numpy().view(np.int64) & ((1 << _TAG_BITS) - 1)
        self.comparisons.append(_Comparison(tag >> 6, tag & 63, thresholds.numpy().astype(np.float64)))

    def split(self) -> NDArray[np.bool_]:
        """Split each box at the first comparison that cuts it; returns which boxes `[C]` were whole, and keeps the parts of the others."""
        open_boxes = np.ones(len(self.low), dtype=bool)
        lows: list[NDArray[np.float64]] = []
        highs: list[NDArray[np.float64]] = []
        for comparison in self.comparisons:
            box, axis = comparison.box, comparison.axis
            low, high = self.low[box, axis, None], self.high[box, axis, None]
            inside = (comparison.thresholds > low + _TOLERANCE) & (comparison.thresholds < high - _TOLERANCE)
            candidates = np.nonzero(inside.any(1) & open_boxes[box])[0]
            cuts = candidates[np.unique(box[candidates], return_index=True)[1]]  # one axis of a box at a time
            edges = np.sort(np.concatenate((low, np.clip(comparison.thresholds, low, high), high), axis=1), axis=1)[cuts]
            row, part = np.nonzero(edges[:, 1:] - edges[:, :-1] > _TOLERANCE)
            parts_low, parts_high = self.low[box[cuts][row]], self.high[box[cuts][row]]
            parts_low[np.arange(len(row)), axis[cuts][row]] = edges[row, part]
            parts_high[np.arange(len(row)), axis[cuts][row]] = edges[row, part + 1]
            lows.append(parts_low)
            highs.append(parts_high)
            open_boxes[box[cuts]] = False
        self.low, self.high = np.concatenate(lows), np.concatenate(highs)
        self.comparisons = []
        return open_boxes


def integrate(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[NoiseCells, int], NDArray[np.int64]],
    num_indexes: int,
    mutate: Callable[[pytest.MonkeyPatch, NoiseCells], None] = lambda patch, cells: None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """All outputs `[N, L]` of `run(cells, number of boxes)` with their probabilities `[N]`; `mutate` may break the tapped sampler."""
    cells = NoiseCells(num_indexes)
    _tap(monkeypatch, cells)
    mutate(monkeypatch, cells)
    outputs: list[NDArray[np.int64]] = []
    weights: list[NDArray[np.float64]] = []
    while len(cells.low):
        assert len(cells.low) < 1 << (_TAG_BITS - 6), "too many boxes: make the test smaller"
        volume = np.prod(cells.high - cells.low, axis=1)
        found = run(cells, len(cells.low))
        whole = cells.split()
        outputs.append(found[whole])
        weights.append(volume[whole])
    return np.concatenate(outputs), np.concatenate(weights)


def _tap(monkeypatch: pytest.MonkeyPatch, cells: NoiseCells) -> None:
    """Feed the production sampler from the boxes and listen to its two comparisons; their code runs unchanged."""
    pick_tokens, accepts = verify_module.pick_tokens, verify_module.accepts

    def tapped_pick_tokens(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        cumulated = weights.cumsum(1)
        cells.record(uniform, cumulated / cumulated[:, -1:])
        return pick_tokens(weights, uniform)

    def tapped_accepts(p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        cells.record(uniform, (p / q).unsqueeze(1))
        return accepts(p, q, uniform)

    monkeypatch.setattr(verify_module, "uniforms", cast(object, cells.uniforms))
    monkeypatch.setattr(verify_module, "pick_tokens", tapped_pick_tokens)
    monkeypatch.setattr(verify_module, "accepts", tapped_accepts)
