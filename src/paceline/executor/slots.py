"""The device half's truth about every running sequence: tokens, pages and sampling parameters by slot.

`executor/step.py` applies a plan here first and commits its verification here last. Nothing else changes a `Slot`.
"""

from itertools import takewhile

from paceline.core.draft import DraftProposal
from paceline.core.plan import Admission, SpanKind, StepPlan
from paceline.core.slot import Slot
from paceline.core.verification import Verification
from paceline.executor.grammar import Grammars


class SlotTable:
    """Slots by id, kept in step with the scheduler by plans alone."""

    def __init__(self, grammars: Grammars) -> None:
        self.slots: dict[int, Slot] = {}
        self.grammars = grammars

    def apply(self, plan: StepPlan) -> None:
        """Carry out a plan's bookkeeping in its fixed order: release, admit, cut page lists, append pages."""
        for slot_id in plan.released_slots:
            del self.slots[slot_id]
        for admission in plan.admitted:
            assert admission.slot not in self.slots, f"slot {admission.slot} admitted twice"
            self.slots[admission.slot] = self._new_slot(admission)
        for slot_id, num_pages in plan.freed_pages:
            del self.slots[slot_id].page_ids[num_pages:]
        for slot_id, page_ids in plan.new_pages:
            self.slots[slot_id].page_ids.extend(page_ids)

    def commit(self, plan: StepPlan, verification: Verification) -> list[tuple[int, ...]]:
        """Append what verification emitted to every slot; returns the new tokens of each span, in order."""
        new_tokens: list[tuple[int, ...]] = []
        for span, tokens in zip(plan.spans, verification.tokens_host, strict=True):
            slot = self.slots[span.slot]
            new = tuple(tokens)
            # A prompt chunk's KV ends with the chunk; in decode it ends before the newest token, whose KV the next step writes.
            slot.num_computed_tokens = (
                span.start + span.num_new_tokens if span.kind is SpanKind.PREFILL else len(slot.token_ids) + len(new) - 1
            )
            slot.append(new)
            new_tokens.append(new)
        return new_tokens

    def _new_slot(self, admission: Admission) -> Slot:
        text, output = admission.sampling.grammar, admission.token_ids[admission.num_prompt_tokens :]
        return Slot(
            token_ids=list(admission.token_ids),
            num_prompt_tokens=admission.num_prompt_tokens,
            sampling=admission.sampling,
            page_ids=[],
            num_computed_tokens=admission.num_computed_tokens,
            stop_token_ids=admission.stop_token_ids,
            prediction_token_ids=admission.prediction_token_ids,
            grammar=None if text is None else self.grammars.start(text, output),
        )


def within_vocabulary(proposal: DraftProposal, vocab_size: int) -> DraftProposal:
    """The proposal with each row cut before the first id that is no token of the target; a drafter may be another program."""
    if all(0 <= token_id < vocab_size for draft in proposal.drafts_host for token_id in draft):
        return proposal
    cut = [list(takewhile(lambda token_id: 0 <= token_id < vocab_size, draft)) for draft in proposal.drafts_host]
    return DraftProposal(cut, proposal.probs)
