"""Turns rows of token ids into a `Batch`. The executor and the draft-model drafter call it once per pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.batch import Batch


@dataclass(frozen=True, slots=True)
class RowInput:
    """The tokens that one row runs in this pass."""

    token_ids: Sequence[int]  # never empty
    start: int  # position of the first one: the tokens before it are in the cache
    page_ids: Sequence[int]  # pages of the row from position 0 on; may reach beyond its tokens
    num_logits: int  # logits wanted for this many last tokens


def build_batch(rows: Sequence[RowInput], page_size: int) -> Batch:
    """A batch of `rows`, one after the other, in KV pages of `page_size` tokens."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_slots: list[int] = []
    logit_rows: list[int] = []
    query_start = [0]
    kv_lens: list[int] = []
    page_ids: list[tuple[int, ...]] = []
    for row in rows:
        end = row.start + len(row.token_ids)
        num_pages = -(-end // page_size)
        assert len(row.page_ids) >= num_pages, f"a row of {end} tokens has {len(row.page_ids)} pages of {page_size} tokens"
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, end))
        write_slots.extend([row.page_ids[p // page_size] * page_size + p % page_size for p in range(row.start, end)])
        logit_rows.extend(range(len(token_ids) - row.num_logits, len(token_ids)))
        query_start.append(len(token_ids))
        kv_lens.append(end)
        page_ids.append(tuple(row.page_ids[:num_pages]))
    return Batch(
        token_ids_host=token_ids,
        positions_host=positions,
        write_slots_host=write_slots,
        logit_rows_host=logit_rows,
        query_start_host=tuple(query_start),
        kv_lens_host=tuple(kv_lens),
        page_ids_host=tuple(page_ids),
    )
