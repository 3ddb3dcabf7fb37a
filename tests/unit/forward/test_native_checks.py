"""Nothing malformed reaches C: every size, index and pointer of a batch is judged before the call. No test here runs C code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline.core.batch import Batch
from paceline.core.kv import KvPages
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError, MissingError
from paceline.forward import native
from paceline.forward.inputs import RowInput, build_batch
from paceline.forward.load import load_native
from paceline.forward.native import Native, Pool, check_batch, read_vectors
from paceline.forward.packed import NoBlocks, PackedMatrix, Weights, aligned, plan_matrices
from paceline.native import library as binding
from tests.fakes.random_model import native_spec, random_program, random_spec, random_tensors

VOCAB, PAGE_SIZE, NUM_PAGES = 100, 4, 12
SPEC = native_spec("qwen2")
PROGRAM = random_program(SPEC)
TENSORS = random_tensors(PROGRAM)


class SpyLibrary:
    """Stands where the library stands and counts passes."""

    variant = "spy"

    def __init__(self, fail: bool = False, code: int = 0) -> None:
        self.num_runs = 0
        self.models: list[tuple[int, int, int]] = []  # address, room for tokens, for logits
        self.freed: list[int] = []
        self.fail = fail
        self.code = code  # what a run gives

    def pool_new(self, num_threads: int) -> int:
        return 0 if self.fail else 77

    def pool_free(self, pool: int) -> None:
        assert pool == 77

    def model_new(self, shape: object, ops: list[binding.Op], max_tokens: int, max_logits: int) -> int:
        self.ops = ops
        self.models.append((len(self.models) + 1, max_tokens, max_logits))
        return len(self.models)

    def model_free(self, model: int) -> None:
        self.freed.append(model)

    def run(self, pool: int, model: int, batch: binding.Batch, kv: binding.Kv, logits: int, hidden: int, profile_ns: int) -> int:
        assert pool == 77
        assert model == len(self.models)
        assert logits
        assert hidden
        self.num_runs += 1
        self.seen = {name: getattr(batch, name) for name in ("num_rows", "num_tokens", "num_logits", "page_size")}
        return self.code


def matrices() -> dict[tuple[str, ...], PackedMatrix]:
    plans = plan_matrices(PROGRAM, "int8", Weights(TENSORS, NoBlocks()))
    return {plan.names: PackedMatrix(aligned(64), plan.num_rows, plan.num_inputs, plan.format) for plan in plans}


def make(library: SpyLibrary) -> Native:
    return Native(PROGRAM, matrices(), read_vectors(PROGRAM, TENSORS), Pool(cast(binding.Library, library), 2), ())


def memory(num_pages: int = NUM_PAGES, dtype: torch.dtype = torch.float16, **changes: int) -> KvPages:
    spec = replace(SPEC, **changes)
    return KvPages(torch.zeros((spec.num_layers, 2, spec.num_kv_heads, num_pages * PAGE_SIZE, spec.head_dim), dtype=dtype), PAGE_SIZE)


def good() -> Batch:
    return build_batch([RowInput([1, 2, 99], 4, [3, 11], 1), RowInput([0], 0, [5], 1)], PAGE_SIZE)


FAULTS: dict[str, Callable[[Batch], Batch]] = {
    "negative token": lambda batch: replace(batch, token_ids_host=[1, -1, 99, 0]),
    "token beyond the vocabulary": lambda batch: replace(batch, token_ids_host=[1, 2, VOCAB, 0]),
    "huge token": lambda batch: replace(batch, token_ids_host=[1, 2, 2**64 + 1, 0]),
    "fewer tokens": lambda batch: replace(batch, token_ids_host=[1, 2, 99]),
    "no tokens": lambda batch: replace(batch, token_ids_host=[], query_start_host=(0,), kv_lens_host=(), page_ids_host=()),
    "fewer positions": lambda batch: replace(batch, positions_host=batch.positions_host[:-1]),
    "another position": lambda batch: replace(batch, positions_host=[4, 5, 7, 0]),
    "negative position": lambda batch: replace(batch, positions_host=[4, 5, 6, -1]),
    "slot beyond the memory": lambda batch: replace(batch, write_slots_host=[1, 2, 3, NUM_PAGES * PAGE_SIZE]),
    "negative slot": lambda batch: replace(batch, write_slots_host=[1, 2, 3, -1]),
    "more slots": lambda batch: replace(batch, write_slots_host=[1, 2, 3, 4, 5]),
    "logits of no token": lambda batch: replace(batch, logit_rows_host=[2, 4]),
    "logits before the first": lambda batch: replace(batch, logit_rows_host=[-1]),
    "rows that start late": lambda batch: replace(batch, query_start_host=(1, 3, 4)),
    "rows that end early": lambda batch: replace(batch, query_start_host=(0, 2, 3)),
    "an empty row": lambda batch: replace(batch, query_start_host=(0, 4, 4)),
    "rows backwards": lambda batch: replace(batch, query_start_host=(0, 5, 4)),
    "a row without a length": lambda batch: replace(batch, kv_lens_host=(7,)),
    "a length below the row's tokens": lambda batch: replace(batch, kv_lens_host=(2, 1)),
    "a length beyond the pages": lambda batch: replace(batch, kv_lens_host=(9, 1), positions_host=[6, 7, 8, 0]),
    "a length beyond 32 bits": lambda batch: replace(batch, kv_lens_host=(7, 2**31), positions_host=[4, 5, 6, 2**31 - 1]),
    "a row without pages": lambda batch: replace(batch, page_ids_host=((3, 11), ())),
    "fewer page lists": lambda batch: replace(batch, page_ids_host=((3, 11),)),
    "a page beyond the memory": lambda batch: replace(batch, page_ids_host=((3, NUM_PAGES), (5,))),
    "a negative page": lambda batch: replace(batch, page_ids_host=((3, -2), (5,))),
}


def test_a_sound_batch_runs() -> None:
    library = SpyLibrary()
    result = make(library).run(good(), memory())
    assert library.num_runs == 1
    assert library.seen == {"num_rows": 2, "num_tokens": 4, "num_logits": 2, "page_size": PAGE_SIZE}
    assert result.logits.shape == (2, VOCAB)
    assert result.hidden.shape == (4, SPEC.hidden_size)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_batch_is_refused(fault: str) -> None:
    library = SpyLibrary()
    forward = make(library)
    with pytest.raises(BadInputError):
        forward.run(FAULTS[fault](good()), memory())
    assert library.num_runs == 0


@pytest.mark.parametrize("value", ["1", 1.5, None])
def test_what_is_no_number_is_refused(value: Any) -> None:
    library = SpyLibrary()
    with pytest.raises(TypeError):
        make(library).run(replace(good(), token_ids_host=[1, value, 2, 3]), memory())
    assert library.num_runs == 0


def test_a_planted_fault_reaches_c_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "check_batch", lambda *batch: None)
    library = SpyLibrary()
    make(library).run(FAULTS["token beyond the vocabulary"](good()), memory())
    assert library.num_runs == 1


@pytest.mark.parametrize(
    "kv",
    [
        memory(dtype=torch.float32),
        memory(num_layers=3),
        memory(num_kv_heads=1),
        memory(head_dim=32),
        KvPages(memory().kv.transpose(0, 1).contiguous().transpose(0, 1), PAGE_SIZE),
        KvPages(memory().kv[:, 0], PAGE_SIZE),
        KvPages(memory().kv, 0),
    ],
    ids=["float32", "layers", "heads", "head_dim", "strided", "keys only", "no page size"],
)
def test_other_memory_is_refused(kv: KvPages) -> None:
    library = SpyLibrary()
    with pytest.raises(BadInputError, match="KV memory"):
        make(library).run(good(), kv)
    assert library.num_runs == 0


def test_memory_that_is_smaller_is_checked_again() -> None:
    forward = make(SpyLibrary())
    forward.run(good(), memory())
    with pytest.raises(BadInputError, match=r"slot of the batch is outside 0\.\.43"):
        forward.run(good(), memory(num_pages=11))


def test_room_grows_with_the_largest_pass_and_is_given_back() -> None:
    library = SpyLibrary()
    forward = make(library)
    forward.run(good(), memory())
    long = build_batch([RowInput([1] * 300, 0, list(range(75)), 300)], PAGE_SIZE)
    kv = memory(num_pages=75)
    assert forward.run(long, kv).logits.shape == (300, VOCAB)
    forward.run(good(), kv)
    assert [room for _, *room in library.models] == [[64, 16], [512, 512]]
    assert library.freed == [1]
    del forward
    assert library.freed == [1, 2]


def test_room_that_cannot_be_had_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass of that size asks for room again: the model that is there is too small for it."""
    library = SpyLibrary()
    forward = make(library)
    long = build_batch([RowInput([1] * 300, 0, list(range(75)), 300)], PAGE_SIZE)
    kv = memory(num_pages=75)
    with monkeypatch.context() as without_memory:
        without_memory.setattr(library, "model_new", lambda *given: 0)
        with pytest.raises(MissingError, match=r"512 tokens; lower --max-num-batched-tokens"):
            forward.run(long, kv)
    assert library.num_runs == 0
    assert library.freed == []
    forward.run(good(), kv)
    forward.run(long, kv)
    assert [room for _, *room in library.models] == [[64, 16], [512, 512]]
    assert library.freed == [1]


def test_arrays_of_a_batch_stay_together_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_memory = native._BatchMemory()
    long = build_batch([RowInput([1] * 300, 0, list(range(75)), 300)], PAGE_SIZE)

    class NoMemory:
        def __mul__(self, count: int) -> None:
            raise MemoryError

    with monkeypatch.context() as without_memory:
        without_memory.setattr(native, "c_int32", NoMemory())  # those of 64 bits come first
        with pytest.raises(MemoryError):
            batch_memory.fill(long, PAGE_SIZE)
    filled = batch_memory.fill(long, PAGE_SIZE)
    assert (binding.c_int64 * 300).from_address(filled.positions)[:] == list(range(300))
    assert (binding.c_int32 * 2).from_address(filled.query_start)[:] == [0, 300]


@pytest.mark.parametrize(("code", "error"), [(-1, MissingError), (binding.TOO_MANY_TASKS, BadInputError)])
def test_a_pass_that_is_too_large_says_what_to_lower(code: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"a pass of 4 tokens.*; lower --max-num-batched-tokens"):
        make(SpyLibrary(code=code)).run(good(), memory())


def test_results_of_small_passes_share_memory_and_large_ones_do_not() -> None:
    forward = make(SpyLibrary())
    first, second = forward.run(good(), memory()), forward.run(good(), memory())
    assert first.logits.data_ptr() == second.logits.data_ptr()
    long = build_batch([RowInput([1] * 100, 0, list(range(25)), 100)], PAGE_SIZE)
    kv = memory(num_pages=25)
    first, second = forward.run(long, kv), forward.run(long, kv)
    assert first.logits.data_ptr() != second.logits.data_ptr()


def test_ops_carry_their_weights() -> None:
    library = SpyLibrary()
    forward = make(library)
    ops = library.ops
    assert [op.kind for op in ops] == [0, *([1, 2, 3, 4, 5] * 2), 6]
    assert ops[0].first.rows == ops[-1].first.rows == VOCAB
    assert (ops[1].first.rows, ops[1].first.k) == (128, 64)
    bias = np.ctypeslib.as_array((binding.c_float * 128).from_address(ops[6].first.bias))
    expected = np.concatenate([TENSORS[f"model.layers.1.self_attn.{part}_proj.bias"].numpy() for part in "qkv"])
    np.testing.assert_array_equal(bias, expected)
    assert not ops[1].q_norm
    assert ops[4].second.rows == 160
    assert forward.weight_bytes == 64 * len(matrices())
    assert forward.choices[0].reason == "one call per step, spy, 2 threads"


def test_matrices_and_vectors_of_another_shape_are_refused() -> None:
    wrong = {names: replace(matrix, num_rows=matrix.num_rows + 16) for names, matrix in matrices().items()}
    with pytest.raises(BadInputError, match="has matrices of"):
        Native(PROGRAM, wrong, read_vectors(PROGRAM, TENSORS), Pool(cast(binding.Library, SpyLibrary()), 1), ())
    with pytest.raises(BadInputError, match=r"model\.norm\.weight has shape \[65\]"):
        read_vectors(PROGRAM, TENSORS | {"model.norm.weight": torch.ones(65)})


def test_programs_that_it_does_not_run_are_named() -> None:
    assert native.supports(PROGRAM) is None
    assert "intermediate size is 136" in str(native.supports(random_program(random_spec())))
    assert native.supports(random_program(random_spec(head_dim=8))) == "heads have 8 elements, not a multiple of 16"
    assert "11 ops" in str(native.supports(replace(PROGRAM, ops=PROGRAM.ops[:-1])))
    pool = Pool(cast(binding.Library, SpyLibrary()), 1)
    with pytest.raises(BadInputError, match="--quantization none"):
        load_native(random_program(random_spec()), Weights(TENSORS, NoBlocks()), "int8", pool, None, "load", SilentProgress())


@pytest.mark.parametrize(
    ("heads", "reason"),
    [
        ((2, 1, 272), "heads have 272 elements, more than 256"),
        ((3, 2, 64), "3 heads cannot share 2 KV heads evenly"),
        ((65, 1, 64), "65 heads share a KV head, more than 64"),
        ((4, 4, 48), "the heads that share a KV head have 48 elements together, not a multiple of 32"),
        ((12, 4, 16), "the heads that share a KV head have 48 elements together, not a multiple of 32"),
        ((2, 1, 256), None),
        ((64, 1, 16), None),
        ((4, 2, 48), None),
    ],
)
def test_heads_that_attention_has_no_room_for_are_named(heads: tuple[int, int, int], reason: str | None) -> None:
    num_heads, num_kv_heads, head_dim = heads
    spec = replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert native.supports(replace(PROGRAM, spec=spec)) == reason


def test_threads_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(MissingError, match="--threads"):
        Pool(cast(binding.Library, SpyLibrary(fail=True)), 4)


def test_checks_of_one_token_are_quick() -> None:
    """Not a benchmark: a bound that only another kind of check would break."""
    import timeit

    batch = build_batch([RowInput([1], 128, list(range(33)), 1)], PAGE_SIZE)
    best_s = min(timeit.repeat(lambda: check_batch(batch, VOCAB, PAGE_SIZE, 1000), number=100, repeat=5)) / 100
    assert best_s < 200e-6
