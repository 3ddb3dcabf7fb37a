"""The shape of one pass in the form that TorchScript takes: `core.batch.Batch` seen by the ops, made once per pass.

The runners build it; ops read it. Everything that all layers share is computed here and not per layer.
"""

from typing import NamedTuple

import torch

from paceline.core.batch import Batch
from paceline.core.program import ModelSpec

# Short one-token rows attend together over a copy of their pages: at 8 rows of 60 to 150 keys that took half the time of one row after
# the other. A larger copy leaves the cache and takes longer, and so do groups of two, which are of longer rows. Pages are copied whole,
# so large pages, for which --block-size must be asked, leave fewer groups.
_GROUP_BYTES = 2 << 20
_MIN_GROUP = 3

MIN_KEYS = 16  # that a product takes; see paged_attention/tiled.py


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
    groups: list[list[int]]  # short one-token rows that attend together
    group_tokens: list[torch.Tensor]  # per group: their tokens [rows] i64
    group_pages: list[torch.Tensor]  # per group: page ids [rows * P] i64, P for each row, its own first one repeated at the end
    group_tails: list[torch.Tensor]  # per group: keys of those pages that are beyond their row's [N] i64, as row * P * page_size + key
    group_masks: list[torch.Tensor]  # per group: [rows, 1, P * page_size] f32, -inf beyond a row's keys
    lone_rows: list[int]  # the other rows


def max_group_keys(spec: ModelSpec) -> int:
    """Keys, padding included, of rows that attend together."""
    return _GROUP_BYTES // (2 * spec.num_kv_heads * spec.head_dim * torch.float32.itemsize)


def pass_layout(batch: Batch, page_size: int, max_keys: int) -> PassLayout:
    """The layout of `batch` in KV pages of `page_size` tokens; `max_keys` as `max_group_keys` gives it."""
    num_tokens = batch.query_start_host[-1]
    write_slots = batch.write_slots
    starts: list[int] = []
    pages: list[torch.Tensor] = []
    for page_ids in batch.page_ids_host:
        first = page_ids[0]
        if page_ids == tuple(range(first, first + len(page_ids))):
            starts.append(first * page_size)
            pages.append(write_slots)  # a tensor must stand here; this one costs nothing
        else:
            starts.append(-1)
            pages.append(torch.tensor(page_ids))
    groups = _groups(batch, page_size, max_keys)
    padded = [_padded_pages(batch, group, page_size) for group in groups]
    is_tail = [_is_tail(batch, group, page_size) for group in groups]
    grouped = {row for group in groups for row in group}
    return PassLayout(
        token_ids=batch.token_ids,
        positions=batch.positions,
        write_slots=write_slots,
        write_start=_write_start(batch, starts),
        logit_rows=batch.logit_rows,
        all_logits=len(batch.logit_rows_host) == num_tokens,
        query_start=list(batch.query_start_host),
        kv_lens=list(batch.kv_lens_host),
        kv_starts=starts,
        kv_pages=pages,
        page_size=page_size,
        groups=groups,
        group_tokens=[torch.tensor([batch.query_start_host[row] for row in group]) for group in groups],
        group_pages=padded,
        group_tails=[tail.flatten().nonzero().squeeze(1) for tail in is_tail],
        group_masks=[torch.zeros(tail.shape).masked_fill_(tail, -torch.inf).unsqueeze(1) for tail in is_tail],
        lone_rows=[row for row in range(len(starts)) if row not in grouped],
    )


def _write_start(batch: Batch, kv_starts: list[int]) -> int:
    """The first slot if the tokens' slots are consecutive: one row whose pages are, or one token."""
    if len(kv_starts) > 1:
        return -1
    if kv_starts[0] >= 0:
        return kv_starts[0] + batch.kv_lens_host[0] - batch.query_start_host[1]
    return -1


def _groups(batch: Batch, page_size: int, max_keys: int) -> list[list[int]]:
    """One-token rows, those of like length together, in groups whose padded keys do not exceed `max_keys`."""
    query_start = batch.query_start_host
    num_keys = [_num_pages(kv_len, page_size) * page_size for kv_len in batch.kv_lens_host]
    rows = [row for row in range(len(num_keys)) if query_start[row + 1] - query_start[row] == 1]
    if len(rows) < _MIN_GROUP:
        return []
    if max(num_keys[row] for row in rows) * len(rows) <= max_keys:
        return [rows]
    rows.sort(key=num_keys.__getitem__, reverse=True)
    groups: list[list[int]] = []
    start = 0
    while start < len(rows):
        size = max(max_keys // num_keys[rows[start]], 1)
        groups.append(rows[start : start + size])
        start += size
    return [group for group in groups if len(group) >= _MIN_GROUP]


def _num_pages(num_keys: int, page_size: int) -> int:
    return -(-max(num_keys, MIN_KEYS) // page_size)


def _padded_pages(batch: Batch, group: list[int], page_size: int) -> torch.Tensor:
    width = _num_pages(max(batch.kv_lens_host[row] for row in group), page_size)
    pages: list[int] = []
    for row in group:
        own = batch.page_ids_host[row]
        pages.extend(own)
        pages.extend(own[:1] * (width - len(own)))
    return torch.tensor(pages)


def _is_tail(batch: Batch, group: list[int], page_size: int) -> torch.Tensor:
    """`[rows, P * page_size]` bool."""
    kv_lens = torch.tensor([batch.kv_lens_host[row] for row in group])
    keys = torch.arange(_num_pages(int(kv_lens.max()), page_size) * page_size)
    return keys >= kv_lens.unsqueeze(1)
