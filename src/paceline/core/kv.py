"""Paged key/value memory of one model. Device half."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of all layers. One page id addresses the target's and the drafter's pages alike.

    Heads lie outside pages, so that a run of consecutive pages is one strided matrix per head and attention needs no copy
    (docs/decisions/0002-kv-layout.md).
    """

    k: torch.Tensor  # [layers, kv_heads, pages * page_size, head_dim]
    v: torch.Tensor  # [layers, kv_heads, pages * page_size, head_dim]
    page_size: int  # tokens
