"""What an architecture file gives: `ops(spec) -> tuple[Op, ...]`, with the checkpoint's tensor names as the ops' weights.

`loader.py` calls it through its table. `decoder_ops` is the list that the llama family shares; an architecture says what it adds.
"""

from collections.abc import Mapping

from paceline.core.program import ModelSpec, Op, OpKind

QKV_BIAS = {"q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias"}
HEAD_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}

_QKV = {
    "norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
}
_GATE_UP = {"norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight"}
_EMBEDDING = "model.embed_tokens.weight"


def decoder_ops(spec: ModelSpec, qkv_extra: Mapping[str, str] | None = None) -> tuple[Op, ...]:
    """The ops of a pre-norm decoder with rotary attention and a SwiGLU MLP.

    `qkv_extra` maps further roles of the qkv op to tensor names within a layer.
    """
    qkv = _QKV | dict(qkv_extra or {})
    ops = [Op(OpKind.EMBED, -1, (("table", _EMBEDDING),))]
    for layer in range(spec.num_layers):
        ops += (
            _layer_op(OpKind.NORM_QKV_ROPE_WRITE, layer, qkv),
            _layer_op(OpKind.PAGED_ATTENTION, layer, {}),
            _layer_op(OpKind.OUT_RESIDUAL, layer, {"out": "self_attn.o_proj.weight"}),
            _layer_op(OpKind.NORM_GATE_UP, layer, _GATE_UP),
            _layer_op(OpKind.DOWN_RESIDUAL, layer, {"down": "mlp.down_proj.weight"}),
        )
    head = _EMBEDDING if spec.tie_word_embeddings else "lm_head.weight"
    ops.append(Op(OpKind.NORM_HEAD, -1, (("norm", "model.norm.weight"), ("head", head))))
    return tuple(ops)


def _layer_op(kind: OpKind, layer: int, names: Mapping[str, str]) -> Op:
    return Op(kind, layer, tuple((role, f"model.layers.{layer}.{name}") for role, name in names.items()))
