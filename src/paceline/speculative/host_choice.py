"""The coupled choice without a tensor, for the rows that most steps have: greedy ones, and sampled ones without cuts.

Called by `verify.py`, which has every other row, and the definition. After a pass the caches hold weights: each call of torch that is
not made saves some thirty microseconds.
"""

from ctypes import c_float

import torch

from paceline.core.request import SamplingParams
from paceline.core.verification import HostRows
from paceline.native.library import Library, load


def choose_on_host(logits: torch.Tensor, rows: HostRows, widths: list[int]) -> list[int] | None:
    """What `verify.choose` gives for `widths[b]` consecutive rows of `logits` `[R, V]` f32 of each row b, one output index after another.

    None where the native library is not there or cannot tell: on another device, for other numbers than float32, with cuts, with two
    tokens too close to call, or with logits that are not finite. Raises ValueError for fewer rows than are named.
    """
    library = load()
    if not isinstance(library, Library) or not logits.is_cpu or not logits.is_contiguous() or logits.dtype is not torch.float32:
        return None
    if logits.shape[0] < sum(widths):  # C reads as many rows as are named
        raise ValueError(f"{sum(widths)} rows of logits are to be judged, {logits.shape[0]} are there")
    vocab_size = logits.shape[1]
    if any(_is_cut(params, vocab_size) for params in rows.sampling):
        return None
    address, row_bytes = logits.data_ptr(), 4 * vocab_size
    chosen: list[int] = []
    for params, output_index, width in zip(rows.sampling, rows.output_index, widths, strict=True):
        for index in range(output_index, output_index + width):
            token_id = _choose_row(library, address, vocab_size, params, index)
            if token_id is None:
                return None
            chosen.append(token_id)
            address += row_bytes
    return chosen


def _is_cut(params: SamplingParams, vocab_size: int) -> bool:
    return params.temperature > 0 and (0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0)


def _choose_row(library: Library, address: int, vocab_size: int, params: SamplingParams, index: int) -> int | None:
    if params.temperature <= 0:
        return library.argmax(address, vocab_size)
    assert params.seed is not None, "a request that samples reached the engine without a seed"
    # In float32, as the tensors of `rows.py` have it.
    contenders = library.contenders(address, vocab_size, c_float(params.temperature).value, params.seed, index)
    return contenders[0] if contenders is not None and len(contenders) == 1 else None
