"""Lists of unequal length as one tensor, for what `draft.py` and `verification.py` hold as lists. Device half."""

from collections.abc import Sequence

import torch


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`rows` `[B][n]` as `[B, K]` i32, K the longest of them; 0 where a row has ended."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32).reshape(len(rows), width)
