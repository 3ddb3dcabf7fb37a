from paceline.models.qwen3 import ops
from tests.fakes.random_model import random_spec


def test_qwen3_adds_a_norm_over_every_q_and_k_head() -> None:
    qkv = ops(random_spec(architecture="qwen3"))[1]
    assert [qkv.weight(f"{part}_norm") for part in "qk"] == [f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"]
    assert qkv.weight("q_bias") is None
