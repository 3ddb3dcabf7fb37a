"""Tiled attention against its oracle, and the property that it exists for: a query's bits do not depend on its company."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.program import ModelSpec, OpKind
from paceline.forward.inputs import RowInput, build_batch
from paceline.kernels.primitives.layout import PassLayout, pass_layout
from tests.fakes.random_model import F32, prepare_op, random_spec

HEADS = [(4, 2, 16), (9, 3, 64), (14, 2, 64), (6, 3, 128), (4, 4, 64), (3, 1, 64), (8, 1, 32), (7, 7, 32)]
PAGE_SIZE = 16
NUM_PAGES = 60


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def attention_spec(heads: tuple[int, int, int]) -> ModelSpec:
    return random_spec(*heads)


class Rows:
    """Pages, and the q, k, v of one sequence of `length` tokens whose keys and values already stand in them."""

    def __init__(self, spec: ModelSpec, length: int, consecutive: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.length = length
        self.qkv = torch.randn(length, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, generator=generator)
        self.qkv[:, : spec.num_heads * spec.head_dim] *= spec.head_dim**-0.5 * 4
        self.kv = torch.randn(2, 2, spec.num_kv_heads, NUM_PAGES * PAGE_SIZE, spec.head_dim, generator=generator)
        num_pages = -(-length // PAGE_SIZE)
        rng = random.Random(seed)
        first = rng.randrange(NUM_PAGES - num_pages + 1)
        self.page_ids = list(range(first, first + num_pages)) if consecutive else rng.sample(range(NUM_PAGES), num_pages)
        slots = build_batch([RowInput([0] * length, 0, self.page_ids, 0)], PAGE_SIZE).write_slots
        heads = self.qkv[:, spec.num_heads * spec.head_dim :].unflatten(1, (2, spec.num_kv_heads, spec.head_dim))
        self.kv[1][:, :, slots] = heads.permute(1, 2, 0, 3)

    def attend(self, module: torch.nn.Module, start: int, end: int) -> torch.Tensor:
        row = RowInput([0] * (end - start), start, self.page_ids, 0)
        layout = pass_layout(build_batch([row], PAGE_SIZE), PAGE_SIZE, 1000)
        return module(self.qkv[start:end].contiguous(), self.kv, layout)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 6), (14, 17), (0, 15), (128, 129), (200, 201), (300, 306), (0, 300), (250, 400)])
def test_tiled_matches_the_oracle(heads: tuple[int, int, int], start: int, end: int) -> None:
    spec = attention_spec(heads)
    tiled = prepare_op(spec, OpKind.PAGED_ATTENTION, F32)
    assert tiled.choice.implementation == "tiled"
    oracle = prepare_op(spec, OpKind.PAGED_ATTENTION, replace(F32, implementation="reference"))
    for consecutive in (True, False):
        rows = Rows(spec, end, consecutive, seed=end)
        got, expected = rows.attend(tiled.module, start, end), rows.attend(oracle.module, start, end)
        assert got.shape == (end - start, spec.num_heads * spec.head_dim)
        assert (got - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_query_has_the_same_bits_in_any_tile(heads: tuple[int, int, int], num_threads: int, data: st.DataObject) -> None:
    """Alone (decode), among drafts, in prompt chunks; on consecutive and on scattered pages."""
    torch.set_num_threads(num_threads)
    spec = attention_spec(heads)
    module = prepare_op(spec, OpKind.PAGED_ATTENTION, F32).module
    length = data.draw(st.integers(1, 700))
    seed = data.draw(st.integers(0, 1000))
    consecutive, scattered = Rows(spec, length, True, seed), Rows(spec, length, False, seed)
    whole = consecutive.attend(module, 0, length)
    assert torch.equal(scattered.attend(module, 0, length), whole)
    for rows in (consecutive, scattered):
        for _ in range(4):
            start = data.draw(st.integers(0, length - 1))
            end = min(length, start + data.draw(st.sampled_from([1, 1, 2, 3, 4, 6, 9, 63, 65, 130])))
            assert torch.equal(rows.attend(module, start, end), whole[start:end]), f"tokens {start}..{end} of {length}"


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    spec = attention_spec((9, 3, 64))
    module = prepare_op(spec, OpKind.PAGED_ATTENTION, F32).module
    lone = [Rows(spec, length, True, seed=length) for length in (21, 150, 90)]
    kv = torch.randn_like(lone[0].kv)
    inputs: list[RowInput] = []
    first_page = 0
    for rows, num_new in zip(lone, (1, 70, 4), strict=True):
        page_ids = list(range(first_page, first_page + len(rows.page_ids)))[::-1]
        first_page += len(page_ids)
        for new, old in zip(page_ids, rows.page_ids, strict=True):
            old_slots, new_slots = (slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in (old, new))
            kv[:, :, :, new_slots] = rows.kv[:, :, :, old_slots]
        inputs.append(RowInput([0] * num_new, rows.length - num_new, page_ids, 0))
    layout = pass_layout(build_batch(inputs, PAGE_SIZE), PAGE_SIZE, 1000)
    qkv = torch.cat([rows.qkv[-num_new:] for rows, num_new in zip(lone, (1, 70, 4), strict=True)])
    expected = [rows.attend(module, rows.length - num_new, rows.length) for rows, num_new in zip(lone, (1, 70, 4), strict=True)]
    assert torch.equal(module(qkv, kv, layout), torch.cat(expected))


def together(module: torch.nn.Module, sequences: list[Rows], page_size: int, max_keys: int) -> tuple[torch.Tensor, PassLayout]:
    """The last token of every sequence in one pass, on scattered pages; what no sequence wrote is not a number."""
    num_pages = NUM_PAGES * PAGE_SIZE // page_size
    kv = torch.full_like(sequences[0].kv[:, :, :, : num_pages * page_size], torch.nan)
    inputs: list[RowInput] = []
    free = random.Random(max_keys).sample(range(num_pages), num_pages)
    for rows in sequences:
        page_ids = [free.pop() for _ in range(-(-rows.length // page_size))]
        inputs.append(RowInput([0], rows.length - 1, page_ids, 0))
        new = build_batch([RowInput([0] * rows.length, 0, page_ids, 0)], page_size).write_slots
        old = build_batch([RowInput([0] * rows.length, 0, rows.page_ids, 0)], PAGE_SIZE).write_slots
        kv[:, :, :, new] = rows.kv[:, :, :, old]
    layout = pass_layout(build_batch(inputs, page_size), page_size, max_keys)
    return module(torch.cat([rows.qkv[-1:] for rows in sequences]), kv, layout), layout


def assert_bits_of_lone_rows(module: torch.nn.Module, sequences: list[Rows], got: torch.Tensor) -> None:
    for row, rows in enumerate(sequences):
        assert torch.equal(got[row], rows.attend(module, rows.length - 1, rows.length)[0]), f"{rows.length} keys"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("max_keys", [1008, 450, 200])
def test_grouped_rows_have_the_bits_of_lone_ones(heads: tuple[int, int, int], max_keys: int, num_threads: int) -> None:
    """The bound decides whether all seven rows attend together, in two groups, or partly alone."""
    torch.set_num_threads(num_threads)
    spec = attention_spec(heads)
    module = prepare_op(spec, OpKind.PAGED_ATTENTION, F32).module
    sequences = [Rows(spec, length, True, seed=length) for length in (3, 141, 17, 16, 64, 1, 130)]
    got, layout = together(module, sequences, PAGE_SIZE, max_keys)
    assert len(layout.groups) == {1008: 1, 450: 2, 200: 1}[max_keys]
    assert_bits_of_lone_rows(module, sequences, got)


@pytest.mark.parametrize("page_size", [1, 5, 16, 24, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", [127, 128, 129, 130, 131, 256, 257, 259])
def test_padding_beyond_a_split_of_the_keys_changes_no_bit(heads: tuple[int, int, int], length: int, page_size: int) -> None:
    """A lone row's last split may have a single key; in a group zeros follow it, up to a whole split more."""
    spec = attention_spec(heads)
    module = prepare_op(spec, OpKind.PAGED_ATTENTION, F32).module
    sequences = [Rows(spec, other, True, seed=other) for other in (length, 20, 262)]
    got, layout = together(module, sequences, page_size, 10_000)
    assert layout.groups == [[0, 1, 2]]
    assert_bits_of_lone_rows(module, sequences, got)


@pytest.mark.parametrize("length", [3, 40])
def test_stale_slots_of_the_last_page_are_never_read(length: int) -> None:
    """A page comes back from another sequence with whatever that one left there, not-a-number included."""
    spec = attention_spec((9, 3, 64))
    module = prepare_op(spec, OpKind.PAGED_ATTENTION, F32).module
    for consecutive in (True, False):
        rows = Rows(spec, length, consecutive, seed=1)
        expected = rows.attend(module, length - 1, length)
        slots = build_batch([RowInput([0] * length, 0, rows.page_ids, 0)], PAGE_SIZE).write_slots
        is_stale = torch.ones(rows.kv.shape[3], dtype=torch.bool)
        is_stale[slots] = False
        rows.kv[:, :, :, is_stale] = torch.nan
        assert torch.equal(rows.attend(module, length - 1, length), expected)
