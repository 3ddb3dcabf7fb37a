"""The seam between the executor and whatever proposes drafts: protocol, construction arguments and the table of drafters.

Called by `executor/`. How many tokens to draft is the scheduler's decision, whether they stand is `verify.py`'s.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

import torch

from paceline.core.draft import DraftProposal
from paceline.core.kv import KvPages
from paceline.core.plan import StepPlan
from paceline.core.slot import Slot
from paceline.core.verification import Verification
from paceline.errors import BadInputError
from paceline.forward.forward import Forward
from paceline.speculative.verify import Rule

DRAFTERS: Mapping[str, str] = {
    "none": "paceline.speculative.drafters.none:NoDrafter",
    "ngram": "paceline.speculative.drafters.ngram:NgramDrafter",
    "draft_model": "paceline.speculative.drafters.draft_model:DraftModelDrafter",
}


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A second model with its own KV memory, whose pages bear the same ids as the target's."""

    forward: Forward
    kv: KvPages


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What every drafter is made from."""

    rule: Rule
    vocab_size: int  # width of the target's logits
    model: DraftModel | None = None  # for drafters whose class says `keeps_kv`


class Drafter(Protocol):
    """Proposes at most `draft_budget` tokens per span; owns its state by slot, which it keeps in step by reading plans."""

    keeps_kv: ClassVar[bool]  # has a model of its own, so needs catch-up and drafter pages
    needs_hidden: ClassVar[bool]  # wants the target's hidden states in `observe`
    num_lookahead: ClassVar[int]  # token positions written beyond the last draft

    def __init__(self, setup: DrafterSetup) -> None: ...

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        """Drafts for the plan's spans, in order; `slots` are as of the plan's start, so `token_ids` ends at the pending token."""
        ...

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None:
        """Learn the step's result after its tokens were committed to `slots`; `hidden` `[T, H]` is the target's."""
        ...

    def num_computed_tokens(self, slot: int) -> int:
        """Leading committed tokens of `slot` whose drafter KV is valid; 0 if the drafter keeps none."""
        ...


def load_drafter_class(name: str) -> type[Drafter]:
    """The class behind a name of `DRAFTERS`, imported only now. Raises BadInputError for an unknown name."""
    if name not in DRAFTERS:
        raise BadInputError(f"unknown drafter {name!r}; this build has {', '.join(DRAFTERS)}", param="draft")
    module_name, class_name = DRAFTERS[name].split(":")
    return cast(type[Drafter], vars(importlib.import_module(module_name))[class_name])


def within_grammar(slot: Slot, draft: list[int], draft_budget: int) -> list[int]:
    """One-hot drafts that the slot's grammar allows: the tokens that it forces, and the draft as far as it agrees with both."""
    if slot.grammar is None:
        return draft
    forced = slot.grammar.forced(draft_budget)
    agreed = draft if draft[: len(forced)] == forced else forced
    return agreed[: slot.grammar.num_allowed(agreed)]


def empty_proposal(num_rows: int) -> DraftProposal:
    """A proposal of length 0 for every row: plain decoding."""
    return DraftProposal([[] for _ in range(num_rows)])
