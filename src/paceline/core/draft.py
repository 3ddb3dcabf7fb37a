"""What a drafter proposes for one step. Device half."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Chain drafts, one row per span of the plan, in the plan's order. Lives for one step only."""

    token_ids: torch.Tensor  # [B, K] i32; columns from lens[b] on are padding (0)
    lens: torch.Tensor  # [B] i32, host memory; 0 is a plain row
    probs: torch.Tensor | None  # [B, K, V] f32: q after the request's own processing; None: drafts were not drawn (one-hot)
