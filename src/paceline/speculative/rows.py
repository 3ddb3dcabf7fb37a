"""Sampling parameters: from slots to one row per span, from these to tensors, and to one row per wanted logits row.

Called by the executor and by drafters that draw with the request's own parameters.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch

from paceline.core.plan import Span
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.core.verification import HostRows, SamplingRows


def host_rows(spans: Sequence[Span], slots: Mapping[int, Slot]) -> HostRows:
    """One row per span, in order; `output_index` is that of the next token to be committed."""
    of_span = [slots[span.slot] for span in spans]
    return HostRows([slot.sampling for slot in of_span], [slot.num_output_tokens for slot in of_span], [span.emits for span in spans])


def sampling_rows(rows: HostRows) -> SamplingRows:
    """The same as tensors."""
    params = rows.sampling
    # Two tensors and their rows instead of six: to make one takes as long as everything else here.
    numbers = np.array([[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], np.float32)
    temperature, top_p, min_p = torch.as_tensor(numbers).unbind()
    integers = np.array([[p.top_k for p in params], [_seed_bits(p) for p in params], rows.output_index], np.int64)
    top_k, seed, output_index = torch.as_tensor(integers).unbind()
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        output_index=output_index,
        emits=torch.as_tensor(np.array(rows.emits, np.bool_)),
        any_sampled=rows.any_sampled,
    )


def select_rows(rows: SamplingRows, row: torch.Tensor, offset: torch.Tensor | int = 0) -> SamplingRows:
    """Rows `row` `[N]` i64 of `rows`, repeats allowed, each `offset` `[N]` output tokens later."""
    return SamplingRows(
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        min_p=rows.min_p[row],
        seed=rows.seed[row],
        output_index=rows.output_index[row] + offset,
        emits=rows.emits[row],
        any_sampled=rows.any_sampled,
    )


def host_ints(values: torch.Tensor) -> list[int]:
    """The integers of a tensor `[N]` as a list."""
    return cast(list[int], values.tolist())  # pyright: ignore[reportUnknownMemberType] - torch leaves tolist untyped


def host_int_rows(values: torch.Tensor) -> list[list[int]]:
    """The integers of a tensor `[N, M]` as lists of rows."""
    return cast(list[list[int]], values.tolist())  # pyright: ignore[reportUnknownMemberType] - torch leaves tolist untyped


def _seed_bits(params: SamplingParams) -> int:
    """The unsigned 64-bit seed as the signed integer of the same bits, which is what an i64 tensor holds."""
    seed = params.seed
    if seed is None:
        assert params.temperature <= 0, "a request that samples reached the engine without a seed"
        return 0  # no noise is drawn for it
    return seed - (1 << 64) if seed >= 1 << 63 else seed
