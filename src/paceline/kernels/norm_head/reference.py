"""The oracle in plain torch."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class NormHead(torch.nn.Module):
    def __init__(self, norm: torch.Tensor, head: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.norm = norm
        self.head = head
        self.eps = eps

    def forward(self, stream: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        hidden_size = self.norm.shape[0]
        rows = stream[layout.logit_rows, :hidden_size]
        hidden = torch.nn.functional.rms_norm(rows, (hidden_size,), self.norm, self.eps)
        return torch.nn.functional.linear(hidden.to(self.head.dtype), self.head).float()


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    head = weight(op, "head", tensors).to(place.dtype)
    return Built(NormHead(weight(op, "norm", tensors).float(), head, spec.rms_norm_eps), head.nbytes, "plain", is_scriptable=False)
