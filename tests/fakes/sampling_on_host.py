"""Sampling parameters of many rows at once are easiest written as tensors; `verify` takes them as requests have them."""

from functools import cache

import torch

from paceline.core.request import SamplingParams
from paceline.core.verification import HostRows, SamplingRows


@cache
def _params(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> SamplingParams:
    return SamplingParams(1, temperature, top_k, top_p, min_p, seed % 2**64)


def on_host(rows: SamplingRows) -> HostRows:
    """`rows` as the executor hands them to `verify`."""
    columns: list[torch.Tensor] = [rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed]
    sampling = [_params(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    return HostRows(sampling, rows.output_index.tolist(), rows.emits.tolist())


def as_lists(drafts: torch.Tensor, lens: torch.Tensor) -> list[list[int]]:
    """The first `lens[b]` of `drafts` `[B, K]` of each row."""
    return [row[:count] for row, count in zip(drafts.tolist(), lens.tolist(), strict=True)]
