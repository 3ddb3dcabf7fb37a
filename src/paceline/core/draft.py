"""What a drafter proposes for one step. Device half."""

from dataclasses import dataclass

import torch

from paceline.core.padding import padded


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Chain drafts, one row per span of the plan, in the plan's order. Lives for one step only.

    The drafts are Python integers, as in `Batch`; the properties are tensors of them, made anew each time.
    """

    drafts_host: list[list[int]]  # [B][lens[b]]; none is a plain row
    probs: torch.Tensor | None = None  # [B, K, V] f32: q after the request's own processing; None: drafts were not drawn (one-hot)

    @property
    def token_ids(self) -> torch.Tensor:
        """`[B, K]` i32, K the longest draft; columns from `lens[b]` on are padding (0)."""
        return padded(self.drafts_host)

    @property
    def lens(self) -> torch.Tensor:
        """`[B]` i32; 0 is a plain row."""
        return torch.tensor([len(draft) for draft in self.drafts_host], dtype=torch.int32)
