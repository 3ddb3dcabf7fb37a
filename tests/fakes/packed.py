"""Packed matrices for tests of the native library, and what they must give, in numpy: layout, quantisation and products written anew."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.native.library import DATA_ALIGNMENT, GROUP, TILE_ROWS, Format, Library, Matrix

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


def aligned(num_bytes: int) -> U8:
    """Zeros that begin at a multiple of 64 bytes."""
    memory = np.zeros(num_bytes + DATA_ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % DATA_ALIGNMENT
    return memory[start : start + num_bytes]


@dataclass(frozen=True)
class Weights:
    """A quantised matrix: elements `[rows, k]` (0..15 or -127..127), scales and minima `[rows, k / 32]`, bias `[rows]` or None."""

    format: Format
    elements: I32
    scales: F16
    minima: F16
    bias: F32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.elements.shape[0], self.elements.shape[1]

    def values(self) -> F32:
        """`[rows, k]` float32: scale * element + minimum, each rounded."""
        scales, minima = (np.repeat(part.astype(np.float32), GROUP, axis=1) for part in (self.scales, self.minima))
        values = scales * self.elements.astype(np.float32)
        return values + minima if self.format == Format.W4 else values

    def packed(self) -> U8:
        """The bytes that `paceline_native.h` describes, element by element."""
        rows, k = self.shape
        num_tiles, num_groups = -(-rows // TILE_ROWS), k // GROUP
        padded = np.zeros((num_tiles * TILE_ROWS, k), dtype=np.int32)
        padded[:rows] = self.elements
        # [tile, group, line q, row, byte]
        lines = padded.reshape(num_tiles, TILE_ROWS, num_groups, 8, 4).transpose(0, 2, 3, 1, 4)
        parts = [lines[:, :, :4] + lines[:, :, 4:] * 16 if self.format == Format.W4 else lines]
        parts = [part.astype(np.uint8).reshape(num_tiles, num_groups, -1) for part in parts]
        for halves in (self.scales, self.minima)[: 2 if self.format == Format.W4 else 1]:
            padded_halves = np.zeros((num_tiles * TILE_ROWS, num_groups), dtype=np.float16)
            padded_halves[:rows] = halves
            by_group = padded_halves.reshape(num_tiles, TILE_ROWS, num_groups).transpose(0, 2, 1)
            parts.append(np.ascontiguousarray(by_group).view(np.uint8).reshape(num_tiles, num_groups, -1))
        return np.concatenate(parts, axis=2).reshape(-1)

    def product(self, x: F32) -> F32:
        """`[rows of x, rows]`: groups in order, integers exactly, every float operation rounded by itself."""
        q, step, sums = quantised(x)
        num_rows, num_groups = step.shape
        q, elements = (part.reshape(-1, num_groups, GROUP).astype(np.int64) for part in (q, self.elements))
        total = np.zeros((num_rows, self.shape[0]), dtype=np.float32)
        with np.errstate(all="ignore"):
            for group in range(num_groups):
                dot = (q[:, group] @ elements[:, group].T).astype(np.float32)
                total = total + dot * (self.scales[:, group].astype(np.float32)[None, :] * step[:, group, None])
                if self.format == Format.W4:
                    offset = step[:, group] * sums[:, group].astype(np.float32)
                    total = total + self.minima[:, group].astype(np.float32)[None, :] * offset[:, None]
            return total if self.bias is None else total + self.bias


def quantised(x: F32) -> tuple[I8, F32, I32]:
    """Activations as the products take them: q `[rows, k]`, scales and sums `[rows, k / 32]`."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    with np.errstate(all="ignore"):
        step = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
        step[step < np.finfo(np.float32).tiny] = 0
        usable = np.isfinite(step) & (step > 0)
        divided = groups / np.where(usable, step, np.float32(1))[:, :, None]
        q = np.where(usable[:, :, None], np.rint(divided), 0).astype(np.int8)
    return q.reshape(x.shape), step, q.sum(axis=2, dtype=np.int32)


def random_weights(rng: np.random.Generator, format: Format, rows: int, k: int, *, with_bias: bool = False) -> Weights:
    low, high = (0, 16) if format == Format.W4 else (-127, 128)
    scales, minima = rng.normal(size=(2, rows, k // GROUP)).astype(np.float16)
    bias = rng.normal(size=rows).astype(np.float32) if with_bias else None
    return Weights(format, rng.integers(low, high, (rows, k), dtype=np.int32), scales, minima, bias)


def native_packed(library: Library, weights: Weights) -> U8:
    """The library's own packing."""
    rows, k = weights.shape
    packed = aligned(library.packed_bytes(weights.format, rows, k))
    elements = weights.elements.astype(np.uint8)  # two's complement for W8
    minima = weights.minima.ctypes.data if weights.format == Format.W4 else 0
    library.pack(weights.format, rows, k, elements.ctypes.data, weights.scales.ctypes.data, minima, packed.ctypes.data)
    return packed


def native_matrix(weights: Weights, packed: U8) -> Matrix:
    """What the library's functions take; `weights` and `packed` must outlive it."""
    rows, k = weights.shape
    bias = 0 if weights.bias is None else weights.bias.ctypes.data
    return Matrix(packed.ctypes.data, bias, rows, k, weights.format, 0)


def native_product(library: Library, weights: Weights, x: F32, num_threads: int = 1) -> F32:
    """`library.linear` of packed `weights`; where nothing was written there are NaNs."""
    packed = native_packed(library, weights)
    out = np.full((x.shape[0], weights.shape[0]), np.nan, dtype=np.float32)
    pool = library.pool_new(num_threads)
    assert pool != 0
    assert library.linear(pool, native_matrix(weights, packed), x.ctypes.data, x.shape[0], out.ctypes.data) == 0
    library.pool_free(pool)
    return out
