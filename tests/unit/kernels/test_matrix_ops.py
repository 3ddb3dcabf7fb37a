"""The ops around one matrix (embed, out_residual, norm_gate_up, down_residual, norm_head) against their oracles."""

from dataclasses import replace

import pytest
import torch

from paceline.core.program import OpKind
from paceline.forward.inputs import RowInput, build_batch
from paceline.kernels.primitives.layout import PassLayout, pass_layout
from paceline.kernels.primitives.residual import NUM_EXTRA
from paceline.kernels.primitives.table import Place
from tests.fakes.random_model import BF16, F32, prepare_op, random_program, random_spec, random_stream, random_tensors

# float32 differs by the order of sums; bfloat16 holds the same bfloat16 weights in the oracle, whose activations are rounded to it too.
PLACES = [pytest.param(F32, 1e-5, id="float32"), pytest.param(BF16, 3e-2, id="bfloat16")]
SPECS = [random_spec(), random_spec(hidden_size=96, num_heads=3, num_kv_heads=1, head_dim=32, architecture="qwen2")]
NUM_TOKENS = [1, 2, 7, 300]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pair(spec_index: int, kind: OpKind, place: Place) -> tuple[torch.nn.Module, torch.nn.Module]:
    spec = SPECS[spec_index]
    oracle = prepare_op(spec, kind, replace(place, implementation="reference"))
    prepared = prepare_op(spec, kind, place)
    assert prepared.choice.implementation.startswith("packed")
    return prepared.module, oracle.module


def layout(num_tokens: int, num_logits: int) -> PassLayout:
    row = RowInput([1] * num_tokens, 0, list(range(40)), num_logits)
    return pass_layout(build_batch([row], 16), 16, 1000)


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert got.dtype is torch.float32
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("place", "tolerance"), PLACES)
@pytest.mark.parametrize("spec_index", [0, 1])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norm_gate_up(spec_index: int, num_tokens: int, place: Place, tolerance: float) -> None:
    packed, oracle = pair(spec_index, OpKind.NORM_GATE_UP, place)
    stream = random_stream(SPECS[spec_index], num_tokens)
    before = stream.clone()
    assert_close(packed(stream), oracle(stream), tolerance)
    assert torch.equal(stream, before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_gate_and_up_give_a_row_the_same_bits_wherever_it_stands(num_threads: int) -> None:
    """301 rows of 136 elements are more than torch leaves in one piece, and two threads cut them within a row."""
    torch.set_num_threads(num_threads)
    module = prepare_op(SPECS[0], OpKind.NORM_GATE_UP, F32).module
    stream = random_stream(SPECS[0], 301)
    together = module(stream)
    for row in (0, 149, 150, 151, 300):
        assert torch.equal(module(stream[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(("place", "tolerance"), PLACES)
@pytest.mark.parametrize("spec_index", [0, 1])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("kind", [OpKind.OUT_RESIDUAL, OpKind.DOWN_RESIDUAL])
def test_residual_ops_add_in_place_and_keep_the_extra_columns(
    kind: OpKind, spec_index: int, num_tokens: int, place: Place, tolerance: float
) -> None:
    spec = SPECS[spec_index]
    packed, oracle = pair(spec_index, kind, place)
    width = spec.num_heads * spec.head_dim if kind is OpKind.OUT_RESIDUAL else spec.intermediate_size
    x = torch.randn(num_tokens, width)
    stream, expected = random_stream(spec, num_tokens), random_stream(spec, num_tokens)
    extra = stream[:, -NUM_EXTRA:].clone()
    got = packed(x, stream)
    assert got is stream
    assert_close(got, oracle(x, expected), tolerance)
    assert torch.equal(stream[:, -NUM_EXTRA:], extra)


@pytest.mark.parametrize(("place", "tolerance"), PLACES)
@pytest.mark.parametrize("spec_index", [0, 1])
@pytest.mark.parametrize(("num_tokens", "num_logits"), [(1, 1), (7, 3), (7, 7), (20, 0)])
def test_norm_head_gives_the_rows_that_are_wanted(
    spec_index: int, num_tokens: int, num_logits: int, place: Place, tolerance: float
) -> None:
    packed, oracle = pair(spec_index, OpKind.NORM_HEAD, place)
    stream, shape = random_stream(SPECS[spec_index], num_tokens), layout(num_tokens, num_logits)
    got = packed(stream, shape)
    if num_logits:
        assert_close(got, oracle(stream, shape), tolerance)
        assert torch.equal(got[-1:], packed(stream[-1:], layout(1, 1))) or place is BF16
    else:
        assert got.shape == (0, SPECS[spec_index].vocab_size)


@pytest.mark.parametrize("place", [F32, BF16])
def test_embed_looks_up_rows_and_appends_what_the_norm_needs(place: Place) -> None:
    spec = random_spec()
    prepared = prepare_op(spec, OpKind.EMBED, place)
    token_ids = torch.tensor([3, 99, 0, 3])
    stream = prepared.module(token_ids)
    table = random_tensors(random_program(spec))["model.embed_tokens.weight"].to(place.dtype)
    assert torch.equal(stream[:, : spec.hidden_size], table[token_ids].float())
    norm = stream.norm(dim=1)
    expected = (table[token_ids].float().square().sum(1) + spec.hidden_size * spec.rms_norm_eps).sqrt()
    assert torch.allclose(norm, expected, rtol=1e-6)
    assert prepared.weight_bytes == table.nbytes
