"""Quantisation and products on every instruction set of this processor: bit by bit what numpy gives from the written formats."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.native.compile import ARCHITECTURES, FLAGS, FOLDER, compile_objects, find_compiler, run
from paceline.native.library import Format, Library, load
from tests.fakes.packed import F32, Weights, native_product, quantised, random_weights

FORMATS = (Format.W4, Format.W8)
SHAPES = ((1, 32), (15, 64), (16, 96), (17, 576), (33, 1536), (50, 1056))


def same_bits(a: F32, b: F32) -> None:
    """Equal floats; a NaN equals any other."""
    assert a.shape == b.shape
    nan = np.isnan(b)
    assert np.array_equal(np.isnan(a), nan)
    assert np.array_equal(a[~nan].view(np.int32), b[~nan].view(np.int32))


def check_products(library: Library, format: Format) -> None:
    rng = np.random.default_rng(int(format))
    for (rows, k), count in zip(SHAPES, (1, 2, 3, 4, 7, 9), strict=True):
        weights = random_weights(rng, format, rows, k, with_bias=rows % 2 == 1)
        x = rng.normal(size=(count, k)).astype(np.float32)
        same_bits(native_product(library, weights, x), weights.product(x))


def check_all_formats(library: Library) -> None:
    for format in FORMATS:
        check_products(library, format)


def test_products_are_those_of_numpy(variant: Library) -> None:
    check_all_formats(variant)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_tokens(variant: Library, format: Format, count: int) -> None:
    rng = np.random.default_rng(count)
    weights = random_weights(rng, format, 32, 1056)
    x = rng.normal(size=(count, 1056)).astype(np.float32)
    same_bits(native_product(variant, weights, x), weights.product(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", [-1.0, 1.0])
def test_extreme_elements_do_not_saturate(variant: Library, format: Format, activation: float) -> None:
    rng = np.random.default_rng(0)
    x = np.full((5, 96), activation, dtype=np.float32)  # every element is -127 or 127
    x[1:, rng.permutation(96)[:48]] *= -1
    for extreme in (0, 15) if format == Format.W4 else (-127, 0, 127):
        weights = replace(random_weights(rng, format, 16, 96), elements=np.full((16, 96), extreme, dtype=np.int32))
        same_bits(native_product(variant, weights, x), weights.product(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 3e-38, 1e-30, 1e30, 3e38])
def test_tiny_and_huge_activations(variant: Library, format: Format, size: float) -> None:
    rng = np.random.default_rng(1)
    weights = random_weights(rng, format, 16, 96)
    x = (rng.uniform(-1, 1, (3, 96)) * size).astype(np.float32)
    same_bits(native_product(variant, weights, x), weights.product(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [0.0, 6e-8, 65504.0])
def test_zero_subnormal_and_huge_scales(variant: Library, format: Format, scale: float) -> None:
    rng = np.random.default_rng(2)
    halves = np.full((16, 3), scale, dtype=np.float16)
    weights = replace(random_weights(rng, format, 16, 96), scales=halves, minima=-halves)
    x = rng.normal(size=(3, 96)).astype(np.float32)
    same_bits(native_product(variant, weights, x), weights.product(x))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_nans_and_leaves_its_mates_alone(variant: Library, bad: float) -> None:
    rng = np.random.default_rng(3)
    weights = random_weights(rng, Format.W4, 20, 64)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    x[2, 40] = bad
    out = native_product(variant, weights, x)
    assert np.isnan(out[2]).all()
    same_bits(out, weights.product(x))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_neither_on_its_mates_nor_on_their_number(variant: Library, format: Format) -> None:
    rng = np.random.default_rng(4)
    weights = random_weights(rng, format, 40, 576)
    x = rng.normal(size=(9, 576)).astype(np.float32)
    alone = np.concatenate([native_product(variant, weights, x[i : i + 1]) for i in range(9)])
    same_bits(native_product(variant, weights, x), alone)
    loud = np.concatenate([x[:4], x[4:] * 1e20])
    same_bits(native_product(variant, weights, loud)[:4], alone[:4])


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_nothing(variant: Library, format: Format) -> None:
    rng = np.random.default_rng(7)
    weights = random_weights(rng, format, 700, 96, with_bias=True)
    x = rng.normal(size=(6, 96)).astype(np.float32)
    same_bits(native_product(variant, weights, x, num_threads=3), weights.product(x))


def test_quantisation(variant: Library) -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(8, 160)) * 10.0 ** rng.integers(-40, 38, (8, 1)), np.zeros((1, 160))]).astype(np.float32)
    x[1, :32] = np.arange(32) - 15.5  # with the next line, elements that lie halfway between two integers
    x[1, 0] = 127.0
    x[2, 5], x[3, 70] = np.inf, np.nan
    q, step, sums = quantised(x)
    assert step[1, 0] == 1
    for i, row in enumerate(x):
        got_q, got_step, got_sums = np.full(160, 99, np.int8), np.full(5, -1, np.float32), np.full(5, -1, np.int32)
        variant.quantise(row.ctypes.data, 160, got_q.ctypes.data, got_step.ctypes.data, got_sums.ctypes.data)
        assert np.array_equal(got_q, q[i])
        same_bits(got_step, step[i])
        assert np.array_equal(got_sums, sums[i])


MUTATIONS = {
    "avx2.c": (
        ("_mm256_mul_ps(dot, both)", "_mm256_mul_ps(_mm256_mul_ps(dot, scale), _mm256_set1_ps(in->step[t][g]))"),  # another order
        ("of->from == 0 ? _mm256_setzero_ps()", "of->from >= 0 ? _mm256_setzero_ps()"),  # later chunks forget the earlier ones
        ("_mm256_abs_epi8(b)", "_mm256_abs_epi8(a)"),
    ),
    "portable.c": (("(both >> 4) * q[i + 16]", "(both >> 4) * q[i]"), (" * offset[g]", " * (offset[g] + scale[g])")),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every source compiled, quickly."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    return compile_objects(tmp_path_factory.mktemp("objects"), compiler, ("-O0",), FOLDER)


def test_a_mistake_in_a_kernel_is_noticed(variant: Library, objects: list[Path], tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    source = f"{variant.variant}.c"
    own_flags = next((files[source] for files in ARCHITECTURES.values() if source in files), ())
    others = [str(path) for path in objects if path.stem != variant.variant]
    for number, (was, becomes) in enumerate(MUTATIONS.get(source, ())):
        text = (FOLDER / source).read_text()
        assert was in text
        mistaken, built = tmp_path / source, tmp_path / f"{number}.so"
        mistaken.write_text(text.replace(was, becomes))
        run([*compiler, *FLAGS, *own_flags, "-O0", f"-I{FOLDER}", "-shared", str(mistaken), *others, "-lm", "-o", str(built)])
        mutant = load(built)
        assert isinstance(mutant, Library)
        assert mutant.force_variant(variant.variant)
        with pytest.raises(AssertionError):
            check_all_formats(mutant)


def test_the_reference_agrees_with_dequantised_weights() -> None:
    """The oracle itself, against plain float64 arithmetic: close to 8-bit activations' error."""
    rng = np.random.default_rng(6)
    for format in FORMATS:
        weights: Weights = random_weights(rng, format, 24, 576)
        x = rng.normal(size=(4, 576)).astype(np.float32)
        exact = x.astype(np.float64) @ weights.values().astype(np.float64).T
        assert np.abs(weights.product(x) - exact).max() < 0.03 * np.abs(exact).std() + 0.01 * np.abs(exact).max()
