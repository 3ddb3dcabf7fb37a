"""The oracle: one projection at a time, rotary positions by cosine and sine, pages written token by token index."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.rotation import frequencies
from paceline.kernels.primitives.table import Built, Place, Tensors, optional_weights, weight


class NormQkvRopeWrite(torch.nn.Module):
    def __init__(self, op: Op, spec: ModelSpec, tensors: Tensors, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.layer = op.layer
        self.norm = weight(op, "norm", tensors).float()
        self.matrices = [weight(op, role, tensors).to(dtype) for role in ("q", "k", "v")]
        self.biases = optional_weights(op, ("q_bias", "k_bias", "v_bias"), tensors)
        self.head_norms = optional_weights(op, ("q_norm", "k_norm"), tensors)
        self.frequencies = frequencies(spec)

    def forward(self, stream: torch.Tensor, kv: torch.Tensor, rotation: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        spec = self.spec
        hidden = torch.nn.functional.rms_norm(stream[:, : spec.hidden_size], (spec.hidden_size,), self.norm, spec.rms_norm_eps)
        heads: list[torch.Tensor] = []
        for i, matrix in enumerate(self.matrices):
            projected = torch.nn.functional.linear(hidden.to(matrix.dtype), matrix).float()
            if self.biases is not None:
                projected = projected + self.biases[i].float()
            heads.append(projected.reshape(projected.shape[0], -1, spec.head_dim))
        q, k, v = heads
        if self.head_norms is not None:
            q = torch.nn.functional.rms_norm(q, (spec.head_dim,), self.head_norms[0].float(), spec.rms_norm_eps)
            k = torch.nn.functional.rms_norm(k, (spec.head_dim,), self.head_norms[1].float(), spec.rms_norm_eps)
        angles = (layout.positions.float().unsqueeze(1) * self.frequencies).unsqueeze(1)
        q = _turn(q, angles) * spec.head_dim**-0.5
        k = _turn(k, angles)
        kv[self.layer, 0][:, layout.write_slots] = k.transpose(0, 1)
        kv[self.layer, 1][:, layout.write_slots] = v.transpose(0, 1)
        return torch.cat([q, k, v], 1).flatten(1)


def _turn(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions on heads `[T, n, d]`: element i pairs with i + d/2."""
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    module = NormQkvRopeWrite(op, spec, tensors, place.dtype)
    return Built(module, sum(matrix.nbytes for matrix in module.matrices), "plain", is_scriptable=False)
