"""The few tokens of a sampled row that can still win, found by the native library in a fraction of the time of noise for all of them.

Called by `verify.py`. It rules tokens out and computes nothing that counts, so choices are the same with and without the library.
"""

from typing import cast

import torch

from paceline.core.verification import SamplingRows
from paceline.native.library import Library, load
from paceline.speculative.rows import host_ints

_SEED_MASK = (1 << 64) - 1


def find_contenders(logits: torch.Tensor, rows: SamplingRows) -> list[list[int]] | None:
    """For each row of `logits` `[n, V]` f32 without top-k and top-p, the ids that can win the coupled choice, rising; at least one.

    None where the library is not there or does not take the rows: on another device, with min-p, or with logits that are not finite.
    """
    library = load()
    if not isinstance(library, Library) or logits.device.type != "cpu" or bool((rows.min_p > 0).any()):
        return None
    logits = logits.contiguous()
    row_bytes = logits.shape[1] * logits.element_size()
    temperatures = cast(list[float], rows.temperature.tolist())  # pyright: ignore[reportUnknownMemberType] - torch leaves tolist untyped
    found: list[list[int]] = []
    for index, (temperature, seed, output) in enumerate(zip(temperatures, host_ints(rows.seed), host_ints(rows.output_index), strict=True)):
        address = logits.data_ptr() + index * row_bytes
        ids = library.contenders(address, logits.shape[1], temperature, seed & _SEED_MASK, output)
        if ids is None:
            return None
        found.append(ids)
    return found
