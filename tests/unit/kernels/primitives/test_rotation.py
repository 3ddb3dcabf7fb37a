"""Rotary factors: against the plain formula, Llama 3's scaling against transformers, and the reordering that makes pairs neighbours."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.kernels.primitives.rotation import Rotation, frequencies, interleave
from tests.fakes.random_model import random_spec


def test_llama3_scaling_is_that_of_transformers() -> None:
    spec = replace(random_spec(head_dim=64, hidden_size=256), rope_theta=500000.0, rope_scaling=(8.0, 1.0, 4.0, 256))
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    assert scale == 1.0
    assert torch.allclose(frequencies(spec), expected, rtol=1e-6)
    plain = frequencies(replace(spec, rope_scaling=None))
    ratio = plain / expected
    assert ratio.min() == 1
    assert ratio.max() == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.9)).any(), "the test must reach the blend between both"


def test_factors_turn_k_scale_q_and_leave_v_alone() -> None:
    spec = random_spec(num_heads=4, num_kv_heads=2, head_dim=16)
    positions = torch.tensor([0, 1, 77, 4095])
    factors = Rotation(spec)(positions).view(4, 8, 8)
    angles = positions.unsqueeze(1).double() * frequencies(spec).double()
    turn = torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(factors[:, 4:6].to(torch.complex128), turn.unsqueeze(1).expand(4, 2, 8), atol=3e-4)
    assert torch.allclose(factors[:, :4], factors[:, 4:5] * 0.25, atol=0)
    assert (factors[:, 6:] == 1).all()


def test_interleave_puts_pairs_side_by_side() -> None:
    rows = torch.arange(16.0)
    assert interleave(rows, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    matrix = torch.randn(16, 3)
    assert torch.equal(interleave(matrix, 8)[:, 1], interleave(matrix[:, 1], 8))
