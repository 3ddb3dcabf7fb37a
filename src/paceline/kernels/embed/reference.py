"""Embedding look-up in plain torch; there is nothing to pack, so it is the only implementation."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.residual import extra_columns, widen
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class Embed(torch.nn.Module):
    def __init__(self, table: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.table = table
        self.extra = extra_columns(table.shape[1], eps)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return widen(self.table.index_select(0, token_ids), self.extra)


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    table = weight(op, "table", tensors).to(place.dtype).contiguous()
    return Built(Embed(table, spec.rms_norm_eps), table.nbytes)
