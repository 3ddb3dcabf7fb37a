"""The tensors of one forward pass of one model. Passed as an argument, never stored. Device half."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of T tokens in all; row b owns tokens `query_start[b] : query_start[b+1]`, its last ones are drafts.

    The `*_host` fields are the batch's shape as Python integers, for runners that loop over rows on the host
    (docs/decisions/0005-batch-with-host-shapes.md).
    """

    token_ids: torch.Tensor  # [T] i64
    positions: torch.Tensor  # [T] i64
    write_slots: torch.Tensor  # [T] i64: page_id * page_size + offset, where the token's KV goes
    logit_rows: torch.Tensor  # [R] i64: indices into T whose logits are wanted, grouped by row, in order
    query_start_host: tuple[int, ...]  # [B+1]
    kv_lens_host: tuple[int, ...]  # [B]: tokens of the row in the cache after this pass, drafts included
    page_ids_host: tuple[tuple[int, ...], ...]  # [B][P]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    logits: torch.Tensor  # [R, V] f32, rows as in Batch.logit_rows
    hidden: torch.Tensor  # [T, H]: the last layer's output before the final norm
