"""The native runner on whole models: near the walk over the same weights in floats, and the same bits however a text is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.program import ModelSpec, OpKind, Program
from paceline.core.progress import SilentProgress
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput
from paceline.forward.load import Forced, Runner, load_forward, load_native
from paceline.forward.memory import allocate_kv
from paceline.forward.native import Native, Pool
from paceline.forward.op_times import op_times
from paceline.forward.packed import NoBlocks, Weights, plan_matrices
from paceline.kernels.primitives.table import Tensors
from paceline.native.library import NUM_OP_KINDS, Library, load
from paceline.quant.scheme import quantise
from tests.fakes.random_model import native_spec, random_program, random_tensors, run_rows

PAGE_SIZE = 8
TEXT = tuple(np.random.default_rng(1).integers(0, 100, 61).tolist())
LLAMA3 = (8.0, 1.0, 4.0, 64)


@pytest.fixture(scope="module")
def pool() -> Pool:
    torch.set_num_threads(1)
    library = load()
    assert isinstance(library, Library), library
    return Pool(library, 2)


def specs() -> dict[str, ModelSpec]:
    each = {name: native_spec(name) for name in ("llama", "qwen2", "qwen3")}
    wide = replace(each["qwen3"], head_dim=32, hidden_size=96, num_heads=6, num_kv_heads=1, intermediate_size=224, vocab_size=109)
    return {**each, "llama3": replace(each["llama"], rope_scaling=LLAMA3, rope_theta=5e5), "wide heads": wide}


def dequantised(program: Program, tensors: Tensors, scheme: str) -> dict[str, torch.Tensor]:
    """The tensors that the quantised ones stand for."""
    values = dict(tensors)
    for plan in plan_matrices(program, scheme, Weights(tensors, NoBlocks())):
        for name in plan.names:
            values[name] = torch.from_numpy(quantise(plan.format, tensors[name].numpy()).values())
    return values


def logits_of(forward: Forward, *lengths: int) -> torch.Tensor:
    """All logits of TEXT, run in pieces of these lengths; what follows the last is left out."""
    kv = allocate_kv(forward, 12, PAGE_SIZE)
    pages = [5, 2, 9, 0, 7, 1, 3, 11]
    found: list[torch.Tensor] = []
    start = 0
    for length in lengths:
        found.append(run_rows(forward, kv, RowInput(TEXT[start : start + length], start, pages, length)).clone())
        start += length
    return torch.cat(found)


def native_forward(program: Program, tensors: Tensors, scheme: str, pool: Pool) -> Native:
    forward = load_native(program, Weights(tensors, NoBlocks()), scheme, pool, None, "load", SilentProgress())
    assert isinstance(forward, Native)
    return forward


@pytest.mark.parametrize("name", specs())
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_near_the_walk_over_the_same_weights(pool: Pool, name: str, scheme: str) -> None:
    """Activations of 8 bits and KV in half precision lie between them, and nothing else: a wrong frequency or bias would show."""
    program = random_program(specs()[name])
    tensors = random_tensors(program)
    found = logits_of(native_forward(program, tensors, scheme, pool), len(TEXT))
    walk = load_forward(program, dequantised(program, tensors, scheme), torch.float32, "load", SilentProgress(), forced=Forced(Runner.WALK))
    expected = logits_of(walk, len(TEXT))
    assert mean_error(found, expected) < 0.06
    other = random_program(replace(specs()[name], rope_theta=2e4))
    wrong = logits_of(native_forward(other, tensors, scheme, pool), len(TEXT))
    assert mean_error(wrong, expected) > 0.12, "a test that would not see another frequency"


def mean_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the positions after the first 20, relative to each one's logits."""
    return float((torch.linalg.norm(found - expected, dim=1) / torch.linalg.norm(expected, dim=1))[20:].mean())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_same_bits_however_a_text_is_cut(pool: Pool, scheme: str) -> None:
    program = random_program(native_spec("qwen3"))
    forward = native_forward(program, random_tensors(program), scheme, pool)
    whole = logits_of(forward, len(TEXT))
    assert torch.equal(whole, logits_of(forward, 17, 1, 1, 8, 34))
    assert torch.equal(whole, logits_of(forward, *[1] * len(TEXT)))
    single = native_forward(program, random_tensors(program), scheme, Pool(pool.library, 1))
    assert torch.equal(whole, logits_of(single, 60, 1)), "on one thread"


def test_rows_do_not_see_each_other(pool: Pool) -> None:
    program = random_program(native_spec())
    forward = native_forward(program, random_tensors(program), "int4", pool)
    kv = allocate_kv(forward, 30, PAGE_SIZE)
    rows = [RowInput(TEXT[:n], 0, list(range(10 * i, 10 * i + 8)), 1) for i, n in enumerate((1, 9, 40))]
    together = run_rows(forward, kv, *rows).clone()
    for index, row in enumerate(rows):
        assert torch.equal(run_rows(forward, allocate_kv(forward, 30, PAGE_SIZE), row)[0], together[index])
    assert torch.equal(run_rows(forward, kv, *rows[::-1]), together.flip(0))


def test_hidden_states_and_no_logits(pool: Pool) -> None:
    from paceline.forward.inputs import build_batch

    program = random_program(native_spec())
    forward = native_forward(program, random_tensors(program), "int8", pool)
    kv = allocate_kv(forward, 4, PAGE_SIZE)
    result = forward.run(build_batch([RowInput(TEXT[:3], 0, [1], 0)], PAGE_SIZE), kv)
    assert result.logits.shape == (0, 100)
    assert result.hidden.shape == (3, 64)
    assert torch.isfinite(result.hidden).all()
    assert result.hidden.abs().min() > 0


def test_time_per_kind_of_op(pool: Pool) -> None:
    program = random_program(native_spec())
    forward = native_forward(program, random_tensors(program), "int8", pool)
    forward.profile_ns = own = np.zeros(NUM_OP_KINDS, np.int64)
    logits_of(forward, 30)
    assert (own > 0).all()
    before = own.copy()
    times = op_times(forward)
    assert [time.name for time in times] == list(OpKind)
    assert all(time.ms > 0 for time in times)
    # The head's 100 rows of 64 inputs are 7 tiles of 16 rows; KV is that of 128 tokens, 2 layers, 2 heads of 16, half precision.
    assert times[-1].num_bytes == 7 * 2 * 544
    assert times[2].num_bytes == 2 * 128 * 2 * 2 * 16 * 2
    assert forward.profile_ns is own
    assert (own == before).all(), "another's account is not charged"
