"""The oracle in plain torch."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class DownResidual(torch.nn.Module):
    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, activation: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        stream[:, : self.matrix.shape[0]] += torch.nn.functional.linear(activation.to(self.matrix.dtype), self.matrix).float()
        return stream


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    matrix = weight(op, "down", tensors).to(place.dtype)
    return Built(DownResidual(matrix), matrix.nbytes, "plain", is_scriptable=False)
