"""The oracle in plain torch."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class NormGateUp(torch.nn.Module):
    def __init__(self, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate
        self.up = up
        self.eps = eps

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        hidden_size = self.norm.shape[0]
        hidden = torch.nn.functional.rms_norm(stream[:, :hidden_size], (hidden_size,), self.norm, self.eps).to(self.gate.dtype)
        gate = torch.nn.functional.linear(hidden, self.gate).float()
        return torch.nn.functional.silu(gate) * torch.nn.functional.linear(hidden, self.up).float()


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    gate, up = (weight(op, role, tensors).to(place.dtype) for role in ("gate", "up"))
    module = NormGateUp(weight(op, "norm", tensors).float(), gate, up, spec.rms_norm_eps)
    return Built(module, gate.nbytes + up.nbytes, "plain", is_scriptable=False)
