"""Paged key/value memory of one model. Device half."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of all layers. One page id addresses the target's and the drafter's pages alike.

    Heads lie outside pages, so that a run of consecutive pages is one strided matrix per head and attention needs no copy
    (docs/decisions/0003-kv-layout.md). Keys and values share one tensor, so that one copy writes both.
    """

    kv: torch.Tensor  # [layers, 2, kv_heads, pages * page_size, head_dim]: keys, then values
    page_size: int  # tokens

    @property
    def k(self) -> torch.Tensor:
        """`[layers, kv_heads, pages * page_size, head_dim]`."""
        return self.kv[:, 0]

    @property
    def v(self) -> torch.Tensor:
        """`[layers, kv_heads, pages * page_size, head_dim]`."""
        return self.kv[:, 1]
