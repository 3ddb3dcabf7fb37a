"""Quantisation from floats: what is kept, how near it comes, and what is refused."""

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.errors import BadInputError
from paceline.native.library import GROUP, Format
from paceline.quant import int4
from paceline.quant.scheme import SCHEME_OF, SCHEMES, QuantisedRows, quantise, stack


def weights(rows: int = 48, k: int = 256, seed: int = 0) -> NDArray[np.float32]:
    """Like a trained matrix: bell-shaped, rows of different size, some outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, k)) * rng.uniform(0.005, 0.1, (rows, 1))
    values[rng.random((rows, k)) < 0.003] *= 8
    return values.astype(np.float32)


def groups_of(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values.reshape(values.shape[0], -1, GROUP)


def relative_error(values: NDArray[np.float32], kept: QuantisedRows) -> float:
    return float(np.linalg.norm(values - kept.values()) / np.linalg.norm(values))


def test_every_format_has_its_scheme() -> None:
    assert sorted(SCHEME_OF.values()) == sorted(SCHEMES)
    for fmt in Format:
        kept = quantise(fmt, weights(rows=3, k=GROUP))
        assert kept.elements.shape == (3, GROUP)
        assert kept.elements.dtype == np.uint8
        assert kept.scales.shape == (3, 1)
        assert (kept.minima is None) == (fmt is Format.W8)


def test_int8_is_within_half_a_step_everywhere() -> None:
    values = weights()
    kept = quantise(Format.W8, values)
    steps = kept.scales.astype(np.float32)[:, :, None]
    assert (np.abs(groups_of(values - kept.values())) <= 0.5001 * steps).all()
    assert (np.abs(groups_of(values)).max(axis=2) >= 126.4 * steps[:, :, 0]).all(), "a coarser scale than is needed"
    assert not (kept.elements.view(np.int8) == -128).any()


def test_int8_of_tiny_weights_is_not_cut_off() -> None:
    """Their scales are among the smallest numbers that half precision has, and far apart."""
    for magnitude in (1e-5, 3e-6, 1e-7):
        values = np.full((1, GROUP), magnitude, np.float32)
        steps = quantise(Format.W8, values).scales.astype(np.float32)
        assert np.abs(quantise(Format.W8, values).values() - values).max() <= 0.5001 * steps.max()


def test_int4_search_beats_the_plain_range() -> None:
    values = weights()
    searched = quantise(Format.W4, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4, "_SHRINKS", (1.0,))
        patch.setattr(int4, "_fitted", lambda groups, elements: (np.zeros(len(groups), np.float32), groups[:, 0]))
        plain = quantise(Format.W4, values)
    assert relative_error(values, searched) < 0.93 * relative_error(values, plain)
    assert searched.elements.max() == 15
    # Group by group the search is never worse, whatever the group.
    errors = [np.square(groups_of(values - kept.values())).sum(axis=2) for kept in (searched, plain)]
    assert (errors[0] <= errors[1] * 1.0001).all()


def test_int4_does_not_depend_on_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = weights()
    whole = quantise(Format.W4, values)
    monkeypatch.setattr(int4, "_CHUNK_GROUPS", 7)
    np.testing.assert_array_equal(whole.values(), quantise(Format.W4, values).values())


@pytest.mark.parametrize("fmt", Format)
def test_constant_groups_are_kept(fmt: Format) -> None:
    for constant in (0.0, 0.5, -0.25):
        values = np.full((2, 2 * GROUP), constant, np.float32)
        np.testing.assert_allclose(quantise(fmt, values).values(), values, rtol=1e-3)


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_weights_beyond_half_precision_are_refused(fmt: Format, value: float) -> None:
    values = weights(rows=2)
    values[1, 5] = value
    with pytest.raises(BadInputError, match="--quantization none"):
        quantise(fmt, values)


@pytest.mark.parametrize("fmt", Format)
def test_stacked_rows_are_the_rows(fmt: Format) -> None:
    parts = [weights(rows=3, seed=1), weights(rows=5, seed=2)]
    together = stack(quantise(fmt, part) for part in parts)
    np.testing.assert_array_equal(together.values(), quantise(fmt, np.concatenate(parts)).values())
