"""A pass in C: against the same model in numpy, and the law that a token's result depends on its own row and on nothing else."""

from collections.abc import Iterator, Sequence
from ctypes import addressof, c_int32
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.native.library import TOO_MANY_TASKS, Batch, Format, Kv, Library, Op, Shape
from tests.fakes.native_model import EPS, QKV, Model, Row, Spec, expected, run

LLAMA = Spec()
QWEN2 = Spec(num_heads=7, num_kv_heads=1, head_dim=64, has_bias=True, is_tied=False)
QWEN3 = Spec(num_heads=6, num_kv_heads=2, head_dim=128, hidden=96, has_head_norm=True)
SPECS = {
    "llama": LLAMA,
    "llama int8": replace(LLAMA, format=Format.W8, intermediate=96),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "every head its own keys": replace(LLAMA, num_heads=3, num_kv_heads=3, head_dim=64, vocab=17),
}
NUM_TOKENS = 530  # three splits of keys, the last one short
PAGE_SIZE = 16
Logits = NDArray[np.float32]


@pytest.fixture
def pool(library: Library) -> Iterator[int]:
    pool = library.pool_new(2)
    yield pool
    library.pool_free(pool)


def tokens_of(spec: Spec, count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab, count).tolist()


def pages_of(count: int, page_size: int = PAGE_SIZE, seed: int = 5) -> list[int]:
    """Pages for `count` tokens, scattered over twice as many."""
    num_pages = -(-count // page_size)
    return np.random.default_rng(seed).permutation(2 * num_pages)[:num_pages].tolist()


@pytest.mark.parametrize("name", SPECS)
def test_one_layer_is_that_of_numpy(library: Library, pool: int, name: str) -> None:
    # Where numpy's double precision rounds an activation to the other side, that token is off by a quantum. Most are not, and with one
    # layer no other token sees it.
    spec = replace(SPECS[name], num_layers=1)
    model = Model(library, spec, seed=1)
    tokens = tokens_of(spec, NUM_TOKENS)
    result = run(model, pool, [Row(tokens, 0, pages_of(NUM_TOKENS), NUM_TOKENS)], model.kv(1200))
    logits, hidden = expected(model, tokens)
    for got, wanted in ((result.logits, logits), (result.hidden, hidden)):
        error = np.abs(got - wanted).max(1) / np.abs(wanted).max(1)
        assert error.max() < 0.1
        for part in np.array_split(error, 5):
            assert np.median(part) < 1e-5
    model.free()


@pytest.mark.parametrize("name", SPECS)
def test_layers_follow_each_other(library: Library, pool: int, name: str) -> None:
    spec = replace(SPECS[name], num_layers=3)
    model = Model(library, spec, seed=2)
    tokens = tokens_of(spec, 40)
    result = run(model, pool, [Row(tokens, 0, pages_of(40), 40)], model.kv(100))
    logits, hidden = expected(model, tokens)
    assert np.abs(result.logits - logits)[0].max() < 1e-5 * np.abs(logits).max()  # then what one token rounds apart reaches all others
    assert np.abs(result.hidden - hidden).max() < 0.05 * np.abs(hidden).max()
    model.free()


def in_chunks(
    model: Model, pool: int, tokens: Sequence[int], chunks: Sequence[int], page_size: int = PAGE_SIZE, seed: int = 5
) -> tuple[Logits, NDArray[np.float16]]:
    """Logits of every token, run in chunks whose sizes repeat, and the KV memory."""
    pages = pages_of(len(tokens), page_size, seed)
    kv = model.kv(2 * len(pages) * page_size)
    parts: list[Logits] = []
    start = 0
    while start < len(tokens):
        part = tokens[start : start + chunks[len(parts) % len(chunks)]]
        parts.append(run(model, pool, [Row(part, start, pages, len(part))], kv, page_size).logits)
        start += len(part)
    return np.concatenate(parts), kv


@pytest.fixture(scope="module", params=["llama", "llama int8", "qwen2", "qwen3"])
def reference(request: pytest.FixtureRequest, library: Library) -> Iterator[tuple[Model, list[int], Logits]]:
    """A model, tokens, and their logits one token at a time with one thread."""
    spec = SPECS[request.param]
    model = Model(library, spec, seed=4)
    tokens = tokens_of(spec, NUM_TOKENS)
    pool = library.pool_new(1)
    logits, _ = in_chunks(model, pool, tokens, [1])
    library.pool_free(pool)
    yield model, tokens, logits
    model.free()


Reference = tuple[Model, list[int], Logits]


@pytest.mark.parametrize("chunks", [[7], [16], [64], [1, 300, 2], [512]])
def test_any_chunking_gives_the_same_bits(pool: int, reference: Reference, chunks: list[int]) -> None:
    model, tokens, wanted = reference
    assert np.array_equal(in_chunks(model, pool, tokens, chunks)[0], wanted)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(library: Library, reference: Reference, num_threads: int) -> None:
    model, tokens, wanted = reference
    pool = library.pool_new(num_threads)
    assert np.array_equal(in_chunks(model, pool, tokens, [500, 1, 4])[0], wanted)
    library.pool_free(pool)


def test_any_instruction_set_gives_the_same_bits(variant: Library, pool: int, reference: Reference) -> None:
    model, tokens, wanted = reference
    assert np.array_equal(in_chunks(model, pool, tokens, [200, 5, 1])[0], wanted)


@pytest.mark.parametrize("page_size", [5, 16, 32, 48, 256])
def test_any_place_of_pages_gives_the_same_bits(pool: int, reference: Reference, page_size: int) -> None:
    model, tokens, wanted = reference
    assert np.array_equal(in_chunks(model, pool, tokens, [300, 8], page_size, seed=page_size)[0], wanted)


def test_any_batch_mates_give_the_same_bits(pool: int, reference: Reference) -> None:
    # Alone a row's splits are tasks of their own; with many rows they are not.
    model, tokens, wanted = reference
    num_rows, step = 9, 4
    num_pages = -(-NUM_TOKENS // PAGE_SIZE)
    kv = model.kv(num_rows * num_pages * PAGE_SIZE)
    rng = np.random.default_rng(0)
    pages = rng.permutation(num_rows * num_pages).reshape(num_rows, num_pages).tolist()
    starts = rng.integers(0, NUM_TOKENS - 8 * step, num_rows)
    starts[:3] = (0, 250, NUM_TOKENS - 8 * step)
    for row in range(num_rows):
        if starts[row]:
            run(model, pool, [Row(tokens[: starts[row]], 0, pages[row], 0)], kv)
    for i in range(8):
        order = rng.permutation(num_rows)[: 1 + 2 * i % num_rows]
        rows: list[Row] = []
        for row in order:
            count = int(rng.integers(1, step + 1))
            rows.append(Row(tokens[starts[row] : starts[row] + count], int(starts[row]), pages[row], count))
        got = run(model, pool, rows, kv).logits
        places = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])
        assert np.array_equal(got, wanted[places])
        for row, one in zip(order, rows, strict=True):
            starts[row] += len(one.token_ids)


def test_tokens_that_follow_are_not_seen(pool: int, reference: Reference) -> None:
    # Keys and values of later tokens are there, a draft's for example, and may even be infinite.
    model, tokens, wanted = reference
    _, kv = in_chunks(model, pool, tokens, [512])
    at = 261
    pages = pages_of(NUM_TOKENS)
    for position in range(at + 1, NUM_TOKENS):
        kv[:, :, :, pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE] = np.inf
    assert np.array_equal(run(model, pool, [Row([tokens[at]], at, pages)], kv).logits[0], wanted[at])


def test_rows_of_logits_are_chosen(pool: int, reference: Reference) -> None:
    model, tokens, wanted = reference
    kv = model.kv(1200)
    pages = pages_of(NUM_TOKENS)
    rows = [Row(tokens[:70], 0, pages[:5], 2), Row(tokens[:40], 0, pages[5:8], 0), Row(tokens[:1], 0, pages[8:9], 1)]
    with_hidden = run(model, pool, rows, kv)
    without = run(model, pool, rows, kv, wants_hidden=False)
    assert np.array_equal(with_hidden.logits, wanted[[68, 69, 0]])
    assert np.array_equal(without.logits, with_hidden.logits)
    assert np.isfinite(with_hidden.hidden).all()
    assert run(model, pool, [Row(tokens[:3], 0, pages, 0)], kv).logits.shape[0] == 0


def test_time_is_told_by_kind_of_op(pool: int, reference: Reference) -> None:
    model, tokens, _ = reference
    profile = run(model, pool, [Row(tokens[:100], 0, pages_of(100), 100)], model.kv(300)).profile_ns
    assert (profile > 0).all()


def test_models_and_pools_come_and_go(library: Library) -> None:
    for _ in range(3):
        pool = library.pool_new(3)
        model = Model(library, replace(LLAMA, num_layers=1), max_tokens=8)
        result = run(model, pool, [Row([1] * 8, 0, [0], 8)], model.kv(16))
        assert np.isfinite(result.logits).all()
        model.free()
        library.pool_free(pool)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_more_tasks_than_can_be_counted_are_refused(library: Library, num_threads: int) -> None:
    """A task for each head: nothing is run, so there need be no weights, and memory that nothing touches costs nothing."""
    frequencies = np.ones(8, np.float32)
    model = library.model_new(Shape(1, 32, 32, 1 << 21, 1 << 15, 16, 1, EPS, frequencies.ctypes.data), [Op(QKV, 0)], 1, 1)
    assert model
    query_start, kv_lens = (c_int32 * 2)(0, 1), (c_int32 * 1)(1)
    batch = Batch(num_rows=1, num_tokens=1, page_size=16, query_start=addressof(query_start), kv_lens=addressof(kv_lens))
    pool = library.pool_new(num_threads)
    assert library.run(pool, model, batch, Kv(), 0, 0, 0) == TOO_MANY_TASKS
    library.pool_free(pool)
    library.model_free(model)
