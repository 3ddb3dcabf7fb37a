"""The shape of one pass in the form that TorchScript takes: `core.batch.Batch` seen by the ops, made once per pass.

`forward/` builds it; ops read it. Everything that all layers share is computed here and not per layer.
"""

from typing import NamedTuple

import torch

from paceline.core.batch import Batch


class PassLayout(NamedTuple):
    """T tokens of B rows. A start of -1 says that slots are not consecutive and the tensor beside it must be used."""

    token_ids: torch.Tensor  # [T] i64
    positions: torch.Tensor  # [T] i64
    write_slots: torch.Tensor  # [T] i64
    write_start: int
    logit_rows: torch.Tensor  # [R] i64
    all_logits: bool  # logit_rows is 0 .. T-1
    query_start: list[int]  # [B+1]
    kv_lens: list[int]  # [B]
    kv_starts: list[int]  # [B] first slot of the row's pages
    kv_pages: list[torch.Tensor]  # [B] page ids [P] i64; empty where kv_starts is given
    page_size: int


def pass_layout(batch: Batch, page_size: int) -> PassLayout:
    """The layout of `batch` in KV pages of `page_size` tokens."""
    num_tokens = batch.query_start_host[-1]
    starts: list[int] = []
    pages: list[torch.Tensor] = []
    for page_ids in batch.page_ids_host:
        first = page_ids[0]
        if page_ids == tuple(range(first, first + len(page_ids))):
            starts.append(first * page_size)
            pages.append(batch.write_slots)  # a tensor must stand here; this one costs nothing
        else:
            starts.append(-1)
            pages.append(torch.tensor(page_ids))
    return PassLayout(
        token_ids=batch.token_ids,
        positions=batch.positions,
        write_slots=batch.write_slots,
        write_start=_write_start(batch, starts),
        logit_rows=batch.logit_rows,
        all_logits=batch.logit_rows.shape[0] == num_tokens,
        query_start=list(batch.query_start_host),
        kv_lens=list(batch.kv_lens_host),
        kv_starts=starts,
        kv_pages=pages,
        page_size=page_size,
    )


def _write_start(batch: Batch, kv_starts: list[int]) -> int:
    """The first slot if the tokens' slots are consecutive: one row whose pages are, or one token."""
    if len(kv_starts) > 1:
        return -1
    if kv_starts[0] >= 0:
        return kv_starts[0] + batch.kv_lens_host[0] - batch.query_start_host[1]
    return -1
