"""The choice among implementations: the first that supports the place, with the reasons of those that did not, and forced ones."""

from dataclasses import replace

import pytest
import torch

from paceline.core.program import OpKind
from paceline.errors import BadInputError
from paceline.kernels.primitives.table import Place
from tests.fakes.random_model import CPU, F32, prepare_op, random_spec


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
