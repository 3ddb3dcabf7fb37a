"""GGUF blocks against the `gguf` package's decoder: the same values, or a stated rounding."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from paceline.errors import UnsupportedModelError
from paceline.native.library import GROUP, Format
from paceline.quant import blocks
from paceline.quant.blocks import from_blocks, is_block_kind, is_exact, row_bytes

ROWS, K = 9, 512


def random_blocks(kind: str, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of blocks with all bit patterns in their fields but for the half-precision scales, which are of usual sizes."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (ROWS, K // block_size, block_bytes), dtype=np.uint8)
    for offset in {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        scale = (rng.standard_normal((ROWS, K // block_size, 1)) * 0.02).astype("<f2")
        data[:, :, offset : offset + 2] = scale.view(np.uint8).reshape(ROWS, -1, 2)
    if kind == "Q8_0":
        data[:, :, 2:][data[:, :, 2:] == 128] = 7
    return data.reshape(ROWS, -1)


def expected(kind: str, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    return dequantize(packed, GGMLQuantizationType[kind])


@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        ("Q4_0", Format.W4),
        ("Q4_1", Format.W4),
        ("Q8_0", Format.W8),
        ("Q4_0", Format.W8),
        ("Q5_0", Format.W8),
        ("IQ4_NL", Format.W8),
    ],
)
def test_exact_kinds_keep_every_value(kind: str, fmt: Format) -> None:
    packed = random_blocks(kind)
    assert is_exact(kind, fmt)
    np.testing.assert_array_equal(from_blocks(kind, packed, fmt).values(), expected(kind, packed))


def test_q4_k_keeps_values_but_for_half_precision_scales() -> None:
    packed = random_blocks("Q4_K")
    kept = from_blocks("Q4_K", packed, Format.W4)
    assert kept.minima is not None
    true = expected("Q4_K", packed).reshape(ROWS, -1, GROUP)
    # A scale and a minimum rounded to 11 bits, the former times an element of at most 15; half precision ends at 2^-24.
    bound = 2**-11 * (15 * np.abs(kept.scales.astype(np.float32)) + np.abs(kept.minima.astype(np.float32))) + 16 * 2**-25
    assert (np.abs(kept.values().reshape(ROWS, -1, GROUP) - true).max(axis=2) <= bound * 1.001).all()
    assert len(np.unique(kept.elements)) == 16


@pytest.mark.parametrize("kind", ["Q6_K", "Q5_1", "Q5_K", "Q4_1", "Q4_K"])
def test_other_kinds_become_int8(kind: str) -> None:
    packed = random_blocks(kind)
    assert not is_exact(kind, Format.W8)
    true = expected(kind, packed)
    kept = from_blocks(kind, packed, Format.W8)
    steps = kept.scales.astype(np.float32)[:, :, None]
    assert (np.abs((kept.values() - true).reshape(ROWS, -1, GROUP)) <= 0.501 * steps).all()


def test_rows_that_the_exact_way_cannot_hold_are_quantised() -> None:
    packed = random_blocks("Q8_0")
    packed[4, 2] = 128  # -128
    kept = from_blocks("Q8_0", packed, Format.W8)
    assert not (kept.elements == 128).any()
    np.testing.assert_allclose(kept.values(), expected("Q8_0", packed), atol=0.02 * 128 * 4 / 127)
    packed = random_blocks("Q4_0")
    packed[0, :2] = np.array([20000], "<f2").view(np.uint8)  # times 8 it is beyond half precision
    with pytest.raises(Exception, match="magnitude"):
        from_blocks("Q4_0", packed, Format.W4)


def test_what_llama_cpp_writes_is_read() -> None:
    """Blocks of its own quantiser, which uses the fields as real files do: negative scales in Q4_0 among others."""
    values = np.random.default_rng(3).standard_normal((ROWS, K)).astype(np.float32)
    for kind, fmt in (("Q4_0", Format.W4), ("Q4_1", Format.W4), ("Q5_0", Format.W8), ("Q8_0", Format.W8)):
        packed = quantize(values, GGMLQuantizationType[kind])
        kept = from_blocks(kind, packed, fmt)
        np.testing.assert_array_equal(kept.values(), expected(kind, packed))
        assert np.linalg.norm(kept.values() - values) < 0.12 * np.linalg.norm(values)


def test_sizes_and_kinds() -> None:
    assert row_bytes("Q4_K", 512) == 2 * 144
    assert row_bytes("Q4_K", 300) == -1
    assert is_block_kind("Q6_K")
    assert not any(is_block_kind(kind) for kind in ("F16", "BF16", "F32", "no such kind"))


def test_a_kind_without_a_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(packed: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
        raise NotImplementedError

    monkeypatch.setattr(blocks, "dequantize", refuse)
    with pytest.raises(UnsupportedModelError, match="Q6_K blocks"):
        from_blocks("Q6_K", random_blocks("Q6_K"), Format.W8)
