"""A packed matrix, and the residual added in place."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.linear import pack_linear
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class DownResidual(torch.nn.Module):
    def __init__(self, hidden_size: int, linear: torch.nn.Module) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = linear

    def forward(self, activation: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        stream.narrow(1, 0, self.hidden_size).add_(self.linear(activation))
        return stream


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    packed = pack_linear(weight(op, "down", tensors), None, place)
    return Built(DownResidual(spec.hidden_size, packed.module), packed.weight_bytes, packed.name, packed.reason)
