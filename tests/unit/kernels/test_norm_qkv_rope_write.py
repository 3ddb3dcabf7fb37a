"""norm_qkv_rope_write against its oracle: q, k and v, what stands in the pages, and that nothing else there is touched."""

from dataclasses import replace

import pytest
import torch

from paceline.core.program import ModelSpec, OpKind
from paceline.forward.inputs import RowInput, build_batch
from paceline.kernels.primitives.layout import pass_layout
from paceline.kernels.primitives.rotation import Rotation, interleave
from paceline.kernels.primitives.table import Place
from tests.fakes.random_model import BF16, F32, prepare_op, random_spec, random_stream

SPECS = [
    random_spec(),
    random_spec(9, 3, 64, 96),
    random_spec(7, 1, 32, 64, "qwen2"),
    random_spec(4, 2, 128, 64, "qwen3"),
]
ROWS = {
    "one token": [RowInput([1], 37, [4, 5, 6], 1)],
    "one token over scattered pages": [RowInput([1], 37, [4, 9, 2], 1)],
    "a draft over a page's end": [RowInput([1] * 6, 13, [7, 3], 6)],
    "a prompt": [RowInput([1] * 40, 0, [0, 1, 2], 1)],
    "a long prompt": [RowInput([1] * 170, 3, list(range(11)), 1)],
    "three rows": [RowInput([1], 5, [8], 1), RowInput([1] * 20, 14, [5, 1, 3], 1), RowInput([1] * 2, 0, [10], 2)],
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def as_packed(heads: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Heads `[..., n, d]` of the oracle in the order that the packed op gives q and k."""
    order = interleave(torch.arange(spec.head_dim).float(), spec.head_dim).long()
    return heads[..., order]


@pytest.mark.parametrize(("place", "tolerance"), [(F32, 2e-5), (BF16, 4e-2)])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.num_heads}-{spec.num_kv_heads}-{spec.head_dim}")
@pytest.mark.parametrize("name", ROWS)
def test_packed_matches_the_oracle(spec: ModelSpec, name: str, place: Place, tolerance: float) -> None:
    packed = prepare_op(spec, OpKind.NORM_QKV_ROPE_WRITE, place)
    oracle = prepare_op(spec, OpKind.NORM_QKV_ROPE_WRITE, replace(place, implementation="reference"))
    assert packed.choice.implementation.startswith("packed")
    layout = pass_layout(build_batch(ROWS[name], 16), 16, 1000)
    stream = random_stream(spec, len(layout.positions))
    kv = torch.randn(2, 2, spec.num_kv_heads, 11 * 16, spec.head_dim)
    got_kv, expected_kv = kv.clone(), kv.clone()
    rotation = Rotation(spec)(layout.positions)
    got = packed.module(stream, got_kv, rotation, layout).unflatten(1, (-1, spec.head_dim))
    expected = oracle.module(stream, expected_kv, rotation, layout).unflatten(1, (-1, spec.head_dim))
    num_turned = spec.num_heads + spec.num_kv_heads
    limit = tolerance * expected.abs().max()
    assert (got[:, :num_turned] - as_packed(expected[:, :num_turned], spec)).abs().max() <= limit
    assert (got[:, num_turned:] - expected[:, num_turned:]).abs().max() <= limit
    # Layer 1 holds the new tokens in the slots of the layout; everything else is as it was.
    written = got[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads)).permute(1, 2, 0, 3)
    assert torch.equal(got_kv[1][:, :, layout.write_slots], written)
    assert (got_kv[1, 0][:, layout.write_slots] - as_packed(expected_kv[1, 0][:, layout.write_slots], spec)).abs().max() <= limit
    assert (got_kv[1, 1][:, layout.write_slots] - expected_kv[1, 1][:, layout.write_slots]).abs().max() <= limit
    got_kv[1][:, :, layout.write_slots] = kv[1][:, :, layout.write_slots]
    assert torch.equal(got_kv, kv)


def test_a_lone_row_on_consecutive_pages_is_written_without_an_index() -> None:
    starts = {name: pass_layout(build_batch(rows, 16), 16, 1000).write_start for name, rows in ROWS.items()}
    assert starts["one token"] == 4 * 16 + 37
    assert starts["a prompt"] == 0
    assert starts["a long prompt"] == 3
    assert starts["one token over scattered pages"] == starts["a draft over a page's end"] == starts["three rows"] == -1


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_a_row_has_the_same_bits_wherever_it_stands(num_threads: int) -> None:
    """302 rows of 480 pairs are more than torch leaves in one piece, and 7 threads cut them beside a vector's edge."""
    torch.set_num_threads(num_threads)
    spec = SPECS[1]
    module = prepare_op(spec, OpKind.NORM_QKV_ROPE_WRITE, F32).module
    stream = random_stream(spec, 302)
    kv = torch.zeros(2, 2, spec.num_kv_heads, 320, spec.head_dim)

    def run(start: int, end: int) -> torch.Tensor:
        layout = pass_layout(build_batch([RowInput([1] * (end - start), start, list(range(20)), 1)], 16), 16, 1000)
        return module(stream[start:end].contiguous(), kv, Rotation(spec)(layout.positions), layout)

    together = run(0, 302)
    for start, end in ((0, 1), (43, 44), (86, 87), (129, 130), (150, 151), (75, 226), (223, 302), (301, 302)):
        assert torch.equal(run(start, end), together[start:end])
