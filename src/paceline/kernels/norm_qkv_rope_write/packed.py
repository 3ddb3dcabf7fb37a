"""One packed matrix for q, k and v; rotary positions as one complex product; k and v leave in one copy."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.linear import pack_linear
from paceline.kernels.primitives.residual import norm_gain, normalise
from paceline.kernels.primitives.rotation import interleave
from paceline.kernels.primitives.table import Built, Place, Tensors, optional_weights, weight
from paceline.kernels.primitives.unsplit import rows_unsplit


class NormQkvRopeWrite(torch.nn.Module):
    def __init__(self, layer: int, spec: ModelSpec, gain: torch.Tensor, linear: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.gain = gain
        self.linear = linear
        self.rows_per_turn = rows_unsplit((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // 2)

    def forward(self, stream: torch.Tensor, kv: torch.Tensor, rotation: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        qkv = self.linear(normalise(stream, self.gain))
        self.turn(qkv, rotation)
        self.write(qkv, kv.select(0, self.layer), layout)
        return qkv

    def turn(self, qkv: torch.Tensor, rotation: torch.Tensor) -> None:
        """Rotary positions and the attention scale, in place."""
        num_tokens = qkv.size(0)
        pairs = torch.view_as_complex(qkv.view(num_tokens, -1, 2))
        if num_tokens <= self.rows_per_turn:
            pairs.mul_(rotation)
            return
        for start in range(0, num_tokens, self.rows_per_turn):
            size = min(self.rows_per_turn, num_tokens - start)
            pairs.narrow(0, start, size).mul_(rotation.narrow(0, start, size))

    def write(self, qkv: torch.Tensor, pages: torch.Tensor, layout: PassLayout) -> None:
        """k and v into their slots of `pages` `[2, Hkv, slots, d]`."""
        num_tokens = qkv.size(0)
        heads = qkv.view(num_tokens, -1, self.head_dim).narrow(1, self.num_heads, 2 * self.num_kv_heads)
        new = heads.view(num_tokens, 2, self.num_kv_heads, self.head_dim).permute(1, 2, 0, 3)
        if layout.write_start >= 0:
            pages.narrow(2, layout.write_start, num_tokens).copy_(new)
        else:
            pages.index_copy_(2, layout.write_slots, new)


class NormQkvHeadNormRopeWrite(NormQkvRopeWrite):
    """The same with RMSNorm over every q and k head before the turn."""

    def __init__(self, layer: int, spec: ModelSpec, gain: torch.Tensor, linear: torch.nn.Module, head_gain: torch.Tensor) -> None:
        super().__init__(layer, spec, gain, linear)
        self.head_gain = head_gain  # [Hq + Hkv, d]
        self.eps = spec.rms_norm_eps

    def forward(self, stream: torch.Tensor, kv: torch.Tensor, rotation: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        qkv = self.linear(normalise(stream, self.gain))
        heads = qkv.view(qkv.size(0), -1, self.head_dim).narrow(1, 0, self.num_heads + self.num_kv_heads)
        heads.mul_(heads.square().mean([-1], True).add_(self.eps).rsqrt_()).mul_(self.head_gain)
        self.turn(qkv, rotation)
        self.write(qkv, kv.select(0, self.layer), layout)
        return qkv


def supports(spec: ModelSpec, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"it runs on the CPU, not on {place.device.type}"
    if spec.head_dim % 16:
        return f"head_dim {spec.head_dim} is not a multiple of 16"
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    turned = [interleave(weight(op, role, tensors), spec.head_dim) for role in ("q", "k")]
    matrix = torch.cat([*turned, weight(op, "v", tensors)])
    del turned
    biases = optional_weights(op, ("q_bias", "k_bias", "v_bias"), tensors)
    bias = None
    if biases is not None:
        bias = torch.cat([interleave(biases[0], spec.head_dim), interleave(biases[1], spec.head_dim), biases[2]]).float()
    packed = pack_linear(matrix, bias, place)
    gain = norm_gain(weight(op, "norm", tensors))
    head_norms = optional_weights(op, ("q_norm", "k_norm"), tensors)
    if head_norms is None:
        module = NormQkvRopeWrite(op.layer, spec, gain, packed.module)
    else:
        q_gain, k_gain = (interleave(norm, spec.head_dim).float() for norm in head_norms)
        head_gain = torch.cat([q_gain.expand(spec.num_heads, -1), k_gain.expand(spec.num_kv_heads, -1)])
        module = NormQkvHeadNormRopeWrite(op.layer, spec, gain, packed.module, head_gain)
    return Built(module, packed.weight_bytes, packed.name, packed.reason)
