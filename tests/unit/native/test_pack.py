"""Packing: the bytes that the header describes, and every row back out of them."""

import numpy as np
import pytest

from paceline.native.library import Format, Library
from tests.fakes.packed import native_matrix, native_packed, random_weights


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize(("rows", "k"), [(1, 32), (16, 64), (37, 160), (48, 576)])
def test_pack_and_unpack(library: Library, format: Format, rows: int, k: int) -> None:
    weights = random_weights(np.random.default_rng(rows), format, rows, k)
    packed = native_packed(library, weights)
    assert np.array_equal(packed, weights.packed())
    values = weights.values()
    matrix = native_matrix(weights, packed)
    for row in range(rows):
        out = np.full(k, np.nan, dtype=np.float32)
        library.unpack_row(matrix, row, out.ctypes.data)
        assert np.array_equal(out, values[row])


def test_sizes(library: Library) -> None:
    assert library.packed_bytes(Format.W4, 16, 32) == 320
    assert library.packed_bytes(Format.W8, 16, 32) == 544
    assert library.packed_bytes(Format.W4, 49152, 576) == 49152 * 576 * 5 // 8
    assert library.packed_bytes(Format.W8, 151936, 8960) == 151936 * 8960 * 17 // 16  # beyond 32 bits
    assert library.packed_bytes(Format.W4, 17, 64) == 2 * 2 * 320


def test_every_half_precision_scale_comes_back(library: Library) -> None:
    finite = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = finite[np.isfinite(finite)]
    finite = finite[: len(finite) // 16 * 16].reshape(16, -1)
    k = 32 * finite.shape[1]
    weights = random_weights(np.random.default_rng(0), Format.W8, 16, 32)
    weights = type(weights)(Format.W8, np.ones((16, k), dtype=np.int32), finite, finite)
    packed = native_packed(library, weights)
    out = np.empty(k, dtype=np.float32)
    for row in range(16):
        library.unpack_row(native_matrix(weights, packed), row, out.ctypes.data)
        assert np.array_equal(out[::32], finite[row].astype(np.float32))
