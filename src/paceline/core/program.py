"""A model as data: the list of fused ops that every runner executes. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum


class OpKind(StrEnum):
    """Fused granularity: one op is one kernel launch on a device that has the kernel."""

    EMBED = "embed"
    NORM_QKV_ROPE_WRITE = "norm_qkv_rope_write"
    PAGED_ATTENTION = "paged_attention"
    OUT_RESIDUAL = "out_residual"
    NORM_GATE_UP = "norm_gate_up"
    DOWN_RESIDUAL = "down_residual"
    NORM_HEAD = "norm_head"


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the program. `weights` names tensors of the checkpoint by role; `layer` is -1 outside the layers."""

    kind: OpKind
    layer: int
    weights: tuple[tuple[str, str], ...]  # (role, checkpoint tensor name), e.g. ("q", "model.layers.0.self_attn.q_proj.weight")

    def weight(self, role: str) -> str | None:
        """The checkpoint name of `role`, or None if the model has no such weight (a bias, a qk-norm)."""
        return dict(self.weights).get(role)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape facts of a model, read from its config.json."""

    architecture: str  # "llama", "qwen2", "qwen3"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, padding included
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[float, float, float, int] | None  # llama 3: factor, low_freq_factor, high_freq_factor, original positions
    tie_word_embeddings: bool


@dataclass(frozen=True, slots=True)
class Program:
    """What a runner runs."""

    spec: ModelSpec
    ops: tuple[Op, ...]
