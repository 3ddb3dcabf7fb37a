"""One forward pass of one model: what goes in and what comes out. Passed as an argument, never stored. Device half."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of T tokens in all; row b owns tokens `query_start[b] : query_start[b+1]`, its last ones are drafts.

    The fields are Python integers, for runners that loop over rows on the host or hand them to C
    (docs/decisions/0005-batch-with-host-shapes.md). The properties are tensors of them, made anew each time: a runner asks once per pass.
    """

    token_ids_host: list[int]  # [T]
    positions_host: list[int]  # [T]
    write_slots_host: list[int]  # [T]: page_id * page_size + offset, where the token's KV goes
    logit_rows_host: list[int]  # [R]: indices into T whose logits are wanted, grouped by row, in order
    query_start_host: tuple[int, ...]  # [B+1]
    kv_lens_host: tuple[int, ...]  # [B]: tokens of the row in the cache after this pass, drafts included
    page_ids_host: tuple[tuple[int, ...], ...]  # [B][P]

    @property
    def token_ids(self) -> torch.Tensor:
        """`[T]` i64."""
        return _tensor(self.token_ids_host)

    @property
    def positions(self) -> torch.Tensor:
        """`[T]` i64."""
        return _tensor(self.positions_host)

    @property
    def write_slots(self) -> torch.Tensor:
        """`[T]` i64."""
        return _tensor(self.write_slots_host)

    @property
    def logit_rows(self) -> torch.Tensor:
        """`[R]` i64."""
        return _tensor(self.logit_rows_host)


def _tensor(values: list[int]) -> torch.Tensor:
    return torch.as_tensor(np.array(values, np.int64))  # a third of the time of torch.tensor


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Valid until the same model's next pass, which may write into the same memory."""

    logits: torch.Tensor  # [R, V] f32, rows as in Batch.logit_rows
    hidden: torch.Tensor  # [T, H]: the last layer's output before the final norm
