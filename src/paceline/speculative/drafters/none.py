"""The drafter that never drafts: every row decodes plainly."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from paceline.core.draft import DraftProposal
from paceline.core.plan import StepPlan
from paceline.core.slot import Slot
from paceline.core.verification import Verification
from paceline.speculative.drafter import DrafterSetup, empty_proposal


class NoDrafter:
    """Keeps nothing, proposes nothing."""

    keeps_kv: ClassVar[bool] = False
    needs_hidden: ClassVar[bool] = False
    num_lookahead: ClassVar[int] = 0

    def __init__(self, setup: DrafterSetup) -> None:
        del setup

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        return empty_proposal(len(plan.spans))

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None:
        pass

    def num_computed_tokens(self, slot: int) -> int:
        return 0
