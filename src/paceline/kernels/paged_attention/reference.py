"""The oracle: every row's keys and values gathered by slot, one masked softmax."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.table import Built, Place, Tensors


class PagedAttention(torch.nn.Module):
    def __init__(self, layer: int, spec: ModelSpec) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec

    def forward(self, qkv: torch.Tensor, kv: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        q = qkv[:, : spec.num_heads * spec.head_dim].reshape(-1, spec.num_kv_heads, group, spec.head_dim)
        rows: list[torch.Tensor] = []
        for row, num_keys in enumerate(layout.kv_lens):
            tokens = slice(layout.query_start[row], layout.query_start[row + 1])
            keys, values = kv[self.layer][:, :, _slots(layout, row, num_keys)]
            scores = torch.einsum("thgd,hnd->thgn", q[tokens], keys)
            is_later = torch.arange(num_keys) > layout.positions[tokens, None]
            probs = scores.masked_fill(is_later[:, None, None], -torch.inf).softmax(-1)
            rows.append(torch.einsum("thgn,hnd->thgd", probs, values))
        return torch.cat(rows).flatten(1)


def _slots(layout: PassLayout, row: int, num_keys: int) -> torch.Tensor:
    offsets = torch.arange(num_keys)
    if layout.kv_starts[row] >= 0:
        return layout.kv_starts[row] + offsets
    return layout.kv_pages[row][offsets // layout.page_size] * layout.page_size + offsets % layout.page_size


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    return Built(PagedAttention(op.layer, spec), 0, is_scriptable=False)
