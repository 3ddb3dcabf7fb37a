"""The list of ops that architectures share: order, names of tensors, and what each architecture adds."""

import pytest

from paceline.core.program import OpKind
from paceline.models import llama, qwen2, qwen3
from paceline.models.spec import tensor_shapes
from tests.fakes.random_model import random_spec

ARCHITECTURES = {"llama": llama.ops, "qwen2": qwen2.ops, "qwen3": qwen3.ops}
LAYER = [
    OpKind.NORM_QKV_ROPE_WRITE,
    OpKind.PAGED_ATTENTION,
    OpKind.OUT_RESIDUAL,
    OpKind.NORM_GATE_UP,
    OpKind.DOWN_RESIDUAL,
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embed_then_five_ops_per_layer_then_head(architecture: str) -> None:
    ops = ARCHITECTURES[architecture](random_spec(architecture=architecture))
    assert [op.kind for op in ops] == [OpKind.EMBED, *LAYER, *LAYER, OpKind.NORM_HEAD]
    assert [op.layer for op in ops] == [-1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_name_is_a_tensor_of_a_checkpoint_and_used_once(architecture: str) -> None:
    spec = random_spec(architecture=architecture)
    names = [name for op in ARCHITECTURES[architecture](spec) for _, name in op.weights]
    assert set(names) <= set(tensor_shapes(spec))
    embeddings = names.count("model.embed_tokens.weight")
    assert embeddings == (2 if spec.tie_word_embeddings else 1)
    others = [name for name in names if name != "model.embed_tokens.weight"]
    assert len(others) == len(set(others))
    assert ("lm_head.weight" in names) is not spec.tie_word_embeddings
