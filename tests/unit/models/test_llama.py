from paceline.models.llama import ops
from tests.fakes.random_model import random_spec


def test_llama_has_neither_biases_nor_head_norms() -> None:
    qkv = ops(random_spec())[1]
    assert [role for role, _ in qkv.weights] == ["norm", "q", "k", "v"]
    assert qkv.weight("q") == "model.layers.0.self_attn.q_proj.weight"
    assert qkv.weight("q_bias") is None
