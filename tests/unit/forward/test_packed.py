"""Matrices of a program in the native layout: which format each gets, and that a packed row is the row that was quantised."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from paceline.core.program import OpKind, Program
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError
from paceline.forward.packed import (
    MatrixPlan,
    NoBlocks,
    PackedMatrix,
    Weights,
    is_four_bit_checkpoint,
    packed_matrices,
    plan_matrices,
    shape_refusal,
    weight_choice,
)
from paceline.native.library import Format, Library, Matrix, load
from paceline.quant.scheme import quantise
from tests.fakes.random_model import native_spec, random_program, random_spec, random_tensors

torch.set_num_threads(1)
EMBEDDING = ("model.embed_tokens.weight",)
QKV = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
DOWN = ("model.layers.0.mlp.down_proj.weight",)


class MadeBlocks:
    """Blocks of some tensors, made by the `gguf` package."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str]) -> None:
        self.kinds = kinds
        self._rows = {name: quantize(tensors[name].numpy(), GGMLQuantizationType[kind]) for name, kind in kinds.items()}

    def rows(self, name: str) -> NDArray[np.uint8]:
        return self._rows[name]


@pytest.fixture(scope="module")
def library() -> Library:
    found = load()
    assert isinstance(found, Library), found
    return found


@pytest.fixture(scope="module")
def program() -> Program:
    return random_program(native_spec())


@pytest.fixture(scope="module")
def tensors(program: Program) -> dict[str, torch.Tensor]:
    return random_tensors(program)


def unpacked(matrix: PackedMatrix, library: Library) -> NDArray[np.float32]:
    rows = np.empty((matrix.num_rows, matrix.num_inputs), np.float32)
    packed = Matrix(data=matrix.data.ctypes.data, rows=matrix.num_rows, k=matrix.num_inputs, format=matrix.format)
    for index, row in enumerate(rows):
        library.unpack_row(packed, index, row.ctypes.data)
    return rows


def block_kinds(program: Program, layer_kind: str, outer_kind: str, others: Mapping[str, str] | None = None) -> dict[str, str]:
    matrices = {name: op.layer for op in program.ops for _, name in op.weights if not name.endswith(("norm.weight", ".bias"))}
    return {name: layer_kind if layer >= 0 else outer_kind for name, layer in matrices.items()} | dict(others or {})


def formats(program: Program, scheme: str, weights: Weights) -> dict[tuple[str, ...], Format]:
    return {plan.names: plan.format for plan in plan_matrices(program, scheme, weights)}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("chunk", [1 << 22, 1500], ids=["whole", "chunks"])
def test_packed_rows_are_the_quantised_rows(
    program: Program, tensors: dict[str, torch.Tensor], library: Library, scheme: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.forward.packed._CHUNK_ELEMENTS", chunk)
    weights = Weights(tensors, NoBlocks())
    plans = plan_matrices(program, scheme, weights)
    found = packed_matrices(plans, weights, library, None, "load", SilentProgress())
    assert found.keys() == {plan.names for plan in plans}
    for plan in plans:
        rows = np.concatenate([tensors[name].numpy() for name in plan.names])
        np.testing.assert_array_equal(unpacked(found[plan.names], library), quantise(plan.format, rows).values(), str(plan.names))


def test_blocks_are_taken_over(program: Program, tensors: dict[str, torch.Tensor], library: Library) -> None:
    blocks = MadeBlocks(tensors, block_kinds(program, "Q4_1", "Q8_0"))
    weights = Weights(tensors, blocks)
    plans = plan_matrices(program, "int4", weights)
    found = packed_matrices(plans, weights, library, None, "load", SilentProgress())
    from gguf.quants import dequantize

    for plan in plans:
        exact = [dequantize(blocks.rows(name), GGMLQuantizationType[blocks.kinds[name]]) for name in plan.names]
        np.testing.assert_array_equal(unpacked(found[plan.names], library), np.concatenate(exact))
    assert weight_choice(plans, weights).reason == "14 Q4_1 matrices as in the file; 1 Q8_0 matrices as in the file"


def test_embedding_and_tied_head_are_one_matrix(program: Program, tensors: dict[str, torch.Tensor]) -> None:
    plans = plan_matrices(program, "int8", Weights(tensors, NoBlocks()))
    assert [plan.names for plan in plans].count(EMBEDDING) == 1
    assert len(plans) == 1 + 2 * 5
    assert MatrixPlan(QKV, 64 + 2 * 32, 64, Format.W8) in plans
    untied = random_program(native_spec("qwen3"))
    assert ("lm_head.weight",) in formats(untied, "int8", Weights(random_tensors(untied), NoBlocks()))


def test_formats(program: Program, tensors: dict[str, torch.Tensor]) -> None:
    floats = formats(program, "int4", Weights(tensors, NoBlocks()))
    assert floats[EMBEDDING] is Format.W8, "8 bits for embedding and head"
    assert {fmt for names, fmt in floats.items() if names != EMBEDDING} == {Format.W4}
    four_bit = Weights(tensors, MadeBlocks(tensors, block_kinds(program, "Q4_0", "Q4_0", {QKV[2]: "Q5_0", DOWN[0]: "Q8_0"})))
    assert is_four_bit_checkpoint(program, four_bit.blocks)
    kept = formats(program, "int4", four_bit)
    assert kept[EMBEDDING] is Format.W4, "4 bits where the file has them"
    assert kept[QKV] is kept[DOWN] is Format.W8, "what the file has in more bits keeps them"
    assert weight_choice(plan_matrices(program, "int4", four_bit), four_bit).implementation == "int4, int8"
    assert set(formats(program, "int8", four_bit).values()) == {Format.W8}
    eight_bit = Weights(tensors, MadeBlocks(tensors, block_kinds(program, "Q8_0", "Q8_0")))
    assert not is_four_bit_checkpoint(program, eight_bit.blocks)
    assert formats(program, "int4", eight_bit)[DOWN] is Format.W4, "asked for, so it is done"
    assert "from Q8_0 to int4" in weight_choice(plan_matrices(program, "int4", eight_bit), eight_bit).reason


def test_widths_that_groups_do_not_divide_are_refused() -> None:
    assert shape_refusal(native_spec()) is None
    assert shape_refusal(random_spec()) == "the intermediate size is 136, not a multiple of 32, the number of weights that share a scale"
    assert "attention heads together is 48" in str(shape_refusal(random_spec(num_heads=3, num_kv_heads=1, hidden_size=64)))


def test_weights_that_cannot_be_quantised_are_refused(program: Program, tensors: dict[str, torch.Tensor], library: Library) -> None:
    broken = tensors | {DOWN[0]: tensors[DOWN[0]] * torch.inf}
    weights = Weights(broken, NoBlocks())
    with pytest.raises(BadInputError, match="--quantization none"):
        packed_matrices(plan_matrices(program, "int8", weights), weights, library, None, "load", SilentProgress())
    assert OpKind.EMBED in {op.kind for op in program.ops}
