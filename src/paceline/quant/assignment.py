"""Which format each matrix of a model gets under a scheme. Torch-free; `forward/packed.py` asks for every matrix at load.

What a 4-bit file holds in 4 bits stays as it is, and so does what it holds in more: its maker left those bits where they count.
"""

from collections.abc import Iterable, Sequence

from paceline.native.library import Format
from paceline.quant.blocks import is_block_kind, is_exact


def is_four_bit(kinds: Iterable[tuple[str | None, int]]) -> bool:
    """Whether a checkpoint is one of 4 bits: at least half of the weights in its layers, given as (ggml's type, number), are."""
    num_weights = num_four_bit = 0
    for kind, count in kinds:
        num_weights += count
        num_four_bit += count if kind is not None and is_exact(kind, Format.W4) else 0
    return 2 * num_four_bit >= num_weights > 0


def assign(scheme: str, kinds: Sequence[str | None], in_layer: bool, keep_blocks: bool) -> Format:
    """The format of a matrix whose parts (q, k and v are one) are of these ggml types, None for floats.

    `keep_blocks`: the checkpoint is a 4-bit one. Embedding and head take 8 bits unless the checkpoint has 4 there.
    """
    if scheme == "int8":
        return Format.W8
    if all(kind is not None and is_exact(kind, Format.W4) for kind in kinds):
        return Format.W4
    if keep_blocks and any(kind is not None and is_block_kind(kind) for kind in kinds):
        return Format.W8
    return Format.W4 if in_layer else Format.W8
