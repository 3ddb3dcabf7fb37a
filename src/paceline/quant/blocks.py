"""GGUF's block formats in the formats of this build: without a change of value where that can be. Torch-free.

Block layouts are ggml's (`ggml-common.h`, and `ggml-quants.c` for the order of elements); floats of the others are the `gguf` package's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from paceline.errors import UnsupportedModelError
from paceline.native.library import GROUP, Format
from paceline.quant.scheme import QuantisedRows, quantise

Bytes = NDArray[np.uint8]

_SUPER = 8  # groups of a K-quant's super-block
_LOW, _SHIFT = np.uint8(15), np.uint8(4)  # the halves of a byte
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def is_block_kind(kind: str) -> bool:
    """Whether ggml's type `kind` holds weights as integers with scales."""
    return kind in GGMLQuantizationType.__members__ and GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] > 1


def is_exact(kind: str, fmt: Format) -> bool:
    """Whether `fmt` holds the values of `kind`: all of them, or (Q4_K) but for the rounding of scales to half precision."""
    return (kind, fmt) in _EXACT


def row_bytes(kind: str, num_inputs: int) -> int:
    """Bytes of a row of so many weights, -1 if they are not whole blocks."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return -1 if num_inputs % block_size else num_inputs // block_size * block_bytes


def from_blocks(kind: str, packed: Bytes, fmt: Format) -> QuantisedRows:
    """Rows of `kind` blocks `[N, bytes]` in `fmt`: taken over as they are if `is_exact`, else quantised from their floats.

    Rows that hold what the exact way cannot (an element of -128, a scale beyond half precision) are quantised too.
    Errors: UnsupportedModelError for a kind without a decoder, BadInputError for values that cannot be.
    """
    decode = _EXACT.get((kind, fmt))
    if decode is not None:
        rows = decode(packed)
        if rows is not None:
            return rows
    return quantise(fmt, floats(kind, packed))


def floats(kind: str, packed: Bytes) -> NDArray[np.float32]:
    """The values of `kind` blocks `[N, bytes]` -> `[N, K]` f32. Errors: UnsupportedModelError for a kind without a decoder."""
    try:
        with np.errstate(all="ignore"):  # damaged blocks give NaN, which whoever takes the floats refuses
            values: NDArray[np.float32] = dequantize(packed, GGMLQuantizationType[kind])
            return values
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{kind} blocks cannot be decoded; use a file quantised as Q4_K_M, Q5_K_M, Q6_K or Q8_0") from error


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The fields of blocks of one group each, `[N, groups, bytes]`."""

    fields: Bytes

    @staticmethod
    def of(packed: Bytes, block_bytes: int) -> "_Blocks":
        return _Blocks(packed.reshape(packed.shape[0], -1, block_bytes))

    def half(self, offset: int) -> NDArray[np.float16]:
        return np.ascontiguousarray(self.fields[:, :, offset : offset + 2]).view("<f2")[:, :, 0]

    def nibbles(self, offset: int) -> Bytes:
        """16 bytes hold a group's 32 elements: the first half in the low nibbles."""
        data = self.fields[:, :, offset : offset + GROUP // 2]
        return np.concatenate([data & _LOW, data >> _SHIFT], axis=2)

    def rows(self, groups: Bytes) -> Bytes:
        return groups.reshape(groups.shape[0], -1)


def _q4_0_as_w4(packed: Bytes) -> QuantisedRows | None:
    blocks = _Blocks.of(packed, 18)
    scales = blocks.half(0)
    minima = scales.astype(np.float32) * -8
    return _checked_w4(blocks.rows(blocks.nibbles(2)), scales.astype(np.float32), minima)


def _q4_1(packed: Bytes) -> QuantisedRows | None:
    blocks = _Blocks.of(packed, 20)
    return QuantisedRows(blocks.rows(blocks.nibbles(4)), blocks.half(0), blocks.half(2))


def _q4_k(packed: Bytes) -> QuantisedRows | None:
    """Super-blocks of 144 bytes: two half-precision super-scales, 6-bit scales and minima of 8 groups in 12 bytes, then nibbles.

    Each 32 bytes of nibbles hold two groups: the low halves one, the high halves the next.
    """
    num_rows = packed.shape[0]
    blocks = _Blocks.of(packed, 144)
    packed_scales = blocks.fields[:, :, 4:16].reshape(num_rows, -1, 3, 4)
    low, high, rest = packed_scales[:, :, 0], packed_scales[:, :, 1], packed_scales[:, :, 2]
    steps = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=2)
    offsets = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=2)
    scales = blocks.half(0).astype(np.float32)[:, :, None] * steps
    minima = blocks.half(2).astype(np.float32)[:, :, None] * offsets
    nibbles = blocks.fields[:, :, 16:].reshape(num_rows, -1, _SUPER // 2, GROUP)
    elements = np.stack([nibbles & _LOW, nibbles >> _SHIFT], axis=3)
    return _checked_w4(elements.reshape(num_rows, -1), scales.reshape(num_rows, -1), -minima.reshape(num_rows, -1))


def _q8_0(packed: Bytes) -> QuantisedRows | None:
    blocks = _Blocks.of(packed, 34)
    elements = np.ascontiguousarray(blocks.rows(blocks.fields[:, :, 2:]))
    if bool((elements == 128).any()):  # -128, which the kernels' products of magnitudes cannot take
        return None
    return QuantisedRows(elements, blocks.half(0), None)


def _q4_0_as_w8(packed: Bytes) -> QuantisedRows | None:
    blocks = _Blocks.of(packed, 18)
    return _as_w8(blocks, blocks.nibbles(2).astype(np.int8) - np.int8(8))


def _q5_0(packed: Bytes) -> QuantisedRows | None:
    """22 bytes: scale, the fifth bit of each of the 32 elements, nibbles."""
    blocks = _Blocks.of(packed, 22)
    fifth = np.unpackbits(blocks.fields[:, :, 2:6], axis=2, bitorder="little")
    return _as_w8(blocks, (blocks.nibbles(6) | (fifth << 4)).astype(np.int8) - np.int8(16))


def _iq4_nl(packed: Bytes) -> QuantisedRows | None:
    blocks = _Blocks.of(packed, 18)
    return _as_w8(blocks, _IQ4_VALUES[blocks.nibbles(2)])


def _as_w8(blocks: _Blocks, elements: NDArray[np.int8]) -> QuantisedRows:
    return QuantisedRows(blocks.rows(elements.view(np.uint8)), blocks.half(0), None)


def _checked_w4(elements: Bytes, scales: NDArray[np.float32], minima: NDArray[np.float32]) -> QuantisedRows | None:
    with np.errstate(over="ignore"):
        half_scales, half_minima = scales.astype(np.float16), minima.astype(np.float16)
    if not (np.isfinite(half_scales).all() and np.isfinite(half_minima).all()):
        return None
    return QuantisedRows(np.ascontiguousarray(elements), half_scales, half_minima)


_EXACT: dict[tuple[str, Format], Callable[[Bytes], QuantisedRows | None]] = {
    ("Q4_0", Format.W4): _q4_0_as_w4,
    ("Q4_1", Format.W4): _q4_1,
    ("Q4_K", Format.W4): _q4_k,
    ("Q8_0", Format.W8): _q8_0,
    ("Q4_0", Format.W8): _q4_0_as_w8,
    ("Q5_0", Format.W8): _q5_0,
    ("IQ4_NL", Format.W8): _iq4_nl,
}
