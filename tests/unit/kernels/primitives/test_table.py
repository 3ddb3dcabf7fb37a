"""The choice among implementations: the first that supports the place, with the reasons of those that did not, and forced ones."""

from dataclasses import replace

import pytest
import torch

from paceline.core.program import OpKind
from paceline.errors import BadInputError
from paceline.kernels import down_residual
from paceline.kernels.primitives.table import Place
from tests.fakes.random_model import BF16, CPU, F32, prepare_op, random_program, random_spec, random_tensors


def test_the_first_choice_is_named_with_how_its_matrix_is_held() -> None:
    choice = prepare_op(random_spec(), OpKind.NORM_QKV_ROPE_WRITE, F32).choice
    assert (choice.name, choice.implementation, choice.reason) == ("norm_qkv_rope_write", "packed, onednn_f32", "first choice")


def test_a_second_choice_says_why_the_first_was_not_taken() -> None:
    choice = prepare_op(random_spec(head_dim=24), OpKind.NORM_QKV_ROPE_WRITE, F32).choice
    assert choice.implementation == "reference, plain"
    assert choice.reason == "not packed: head_dim 24 is not a multiple of 16"


def test_a_forced_implementation_is_taken_where_an_op_has_it() -> None:
    place = replace(F32, implementation="reference")
    assert prepare_op(random_spec(), OpKind.NORM_GATE_UP, place).choice.implementation == "reference, plain"
    tiled = replace(F32, implementation="tiled")
    assert prepare_op(random_spec(), OpKind.PAGED_ATTENTION, tiled).choice.implementation == "tiled"
    assert prepare_op(random_spec(), OpKind.NORM_GATE_UP, tiled).choice.implementation == "packed, onednn_f32"


def test_a_forced_implementation_that_cannot_run_is_refused_with_its_reason() -> None:
    with pytest.raises(BadInputError, match="head_dim 24 is not a multiple of 16"):
        prepare_op(random_spec(head_dim=24), OpKind.NORM_QKV_ROPE_WRITE, Place(CPU, torch.float32, "packed"))


def test_a_matrix_that_is_not_held_in_the_best_way_says_why() -> None:
    spec = random_spec()
    program = random_program(spec)
    tensors = random_tensors(program)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    op = next(op for op in program.ops if op.kind is OpKind.DOWN_RESIDUAL and op.layer == 1)
    choice = down_residual.prepare(op, spec, tensors, BF16).choice
    assert choice.implementation == "packed, plain"
    assert "1e+06 does not fit half precision" in choice.reason or "FBGEMM needs" in choice.reason
