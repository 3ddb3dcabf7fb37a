"""Plans, slots and a toy target around one drafter: what scheduler and executor do, with every choice in the test's hands."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.draft import DraftProposal
from paceline.core.plan import Admission, Span, SpanKind, StepPlan
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.speculative.drafter import Drafter
from paceline.speculative.rows import host_rows
from paceline.speculative.verify import Rule, verify
from tests.fakes.toy_forward import ToyForward


@dataclass(frozen=True)
class Work:
    """What a slot shall do in one step. `catch_up` None: all that the drafter lacks, as drafting needs."""

    slot: int
    draft_budget: int = 0
    catch_up: int | None = None
    prefill_end: int | None = None  # a prompt chunk that ends here and emits nothing


class DrafterDriver:
    """Owns the slots; `step` runs one plan through drafter and toy target."""

    def __init__(self, drafter: Drafter, target: ToyForward, rule: Rule, page_size: int, num_pages: int) -> None:
        self.drafter = drafter
        self.target = target
        self.rule = rule
        self.page_size = page_size
        self.slots: dict[int, Slot] = {}
        self._free_pages = random.Random(1).sample(range(num_pages), num_pages)
        self._released: list[int] = []
        self._admitted: list[Admission] = []
        self._step_id = 0

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        prediction: tuple[int, ...] = (),
    ) -> None:
        """Put a sequence into a slot; the next plan says so. `token_ids` may hold output already, as after preemption."""
        prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self._admitted.append(Admission(slot, tuple(token_ids), prompt, sampling, (), 0, 0))
        self.slots[slot] = Slot(list(token_ids), prompt, sampling, [], 0, prediction_token_ids=prediction)

    def release(self, slot: int) -> None:
        self._released.append(slot)
        self._free_pages += self.slots.pop(slot).page_ids

    def plan(self, work: Sequence[Work]) -> StepPlan:
        """The plan of one step, with pages for it in the slots, as the executor has them when it proposes."""
        fresh = {admission.slot: admission.num_draft_computed_tokens for admission in self._admitted}
        spans = tuple(self._span(item, fresh.get(item.slot)) for item in work)
        new_pages = tuple((span.slot, self._cover(span)) for span in spans)
        self._step_id += 1
        plan = StepPlan(self._step_id, tuple(self._released), tuple(self._admitted), new_pages, (), spans, 0)
        self._released, self._admitted = [], []
        return plan

    def step(self, work: Sequence[Work]) -> DraftProposal:
        """Propose, verify against the toy target, commit, observe."""
        plan = self.plan(work)
        proposal = self.drafter.propose(plan, self.slots)
        logits: list[torch.Tensor] = []
        for i, span in enumerate(plan.spans):
            if span.emits:
                tokens = self.slots[span.slot].token_ids
                drafts = proposal.drafts_host[i]
                logits += [self.target.prefix_logits([*tokens, *drafts[:j]]) for j in range(len(drafts) + 1)]
        stacked = torch.stack(logits) if logits else torch.zeros((0, self.target.spec.vocab_size))
        result = verify(stacked, proposal, host_rows(plan.spans, self.slots), self.rule)
        for i, span in enumerate(plan.spans):
            self.slots[span.slot].append(result.tokens_host[i])
        self.drafter.observe(plan, self.slots, result, torch.zeros((len(logits), 1)))
        return proposal

    def _span(self, work: Work, fresh_count: int | None) -> Span:
        length = len(self.slots[work.slot].token_ids)
        lacking = length - (self.drafter.num_computed_tokens(work.slot) if fresh_count is None else fresh_count)
        catch_up = (lacking if work.catch_up is None else work.catch_up) if self.drafter.keeps_kv else 0
        if work.prefill_end is not None:
            return Span(work.slot, SpanKind.PREFILL, 0, 0, work.prefill_end, 0, catch_up, emits=False)
        return Span(work.slot, SpanKind.DECODE, length - 1, length - 1, 1, work.draft_budget, catch_up, emits=True)

    def _cover(self, span: Span) -> tuple[int, ...]:
        slot = self.slots[span.slot]
        wanted = -(-max(len(slot.token_ids), span.start_max + 1 + span.draft_budget) // self.page_size)
        new = tuple(self._free_pages.pop() for _ in range(wanted - len(slot.page_ids)))
        slot.page_ids.extend(new)
        return new
