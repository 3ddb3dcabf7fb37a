from paceline.models.qwen2 import ops
from tests.fakes.random_model import random_spec


def test_qwen2_adds_biases_to_q_k_and_v() -> None:
    qkv = ops(random_spec(architecture="qwen2"))[6]
    assert [qkv.weight(f"{part}_bias") for part in "qkv"] == [f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"]
    assert qkv.weight("q_norm") is None
