"""A second, smaller model drafts. It runs through the same `Forward` as the target and writes its own KV memory under the same page ids.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". How far it catches up per step is the plan's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.core.draft import DraftProposal
from paceline.core.plan import Span, StepPlan
from paceline.core.slot import Slot
from paceline.core.verification import SamplingRows, Verification
from paceline.forward.inputs import RowInput, build_batch
from paceline.speculative.adjust import AdjustedRows, adjust
from paceline.speculative.drafter import DrafterSetup, empty_proposal
from paceline.speculative.rows import host_ints, host_rows, sampling_rows, select_rows
from paceline.speculative.verify import Rule, choose, draw_drafts


@dataclass(frozen=True, slots=True)
class _DraftingRow:
    """A span that drafts in this step."""

    index: int  # of the span in the plan
    slot: int
    length: int  # committed tokens before the step
    num_drafts: int
    forced: list[int]  # its first drafts, where a grammar leaves no choice


class DraftModelDrafter:
    """Drafts token by token with the request's own processing; under `coupled` with the target's noise, under `ratio` with its own."""

    keeps_kv: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = False
    num_lookahead: ClassVar[int] = 0  # the last draft is never run, so the KV written ends before the last planned token

    def __init__(self, setup: DrafterSetup) -> None:
        assert setup.model is not None, "the draft_model drafter needs a model"
        self._rule = setup.rule
        self._vocab_size = setup.vocab_size
        self._forward = setup.model.forward
        self._kv = setup.model.kv
        self._num_computed: dict[int, int] = {}  # slot -> leading tokens with valid drafter KV, drafts included within a step

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        for slot_id in plan.released_slots:
            self._num_computed.pop(slot_id, None)
        for admission in plan.admitted:
            self._num_computed[admission.slot] = admission.num_draft_computed_tokens
        drafting, logits = self._catch_up(plan.spans, slots)
        if logits is None:
            return empty_proposal(len(plan.spans))
        return self._draft(plan.spans, slots, drafting, logits)

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None:
        # KV of rejected drafts is stale: what stays valid ends before the one token that no draft foresaw.
        for span in plan.spans:
            if span.emits:
                self._num_computed[span.slot] = min(self._num_computed[span.slot], len(slots[span.slot].token_ids) - 1)

    def num_computed_tokens(self, slot: int) -> int:
        return self._num_computed.get(slot, 0)

    def _catch_up(self, spans: Sequence[Span], slots: Mapping[int, Slot]) -> tuple[list[_DraftingRow], torch.Tensor | None]:
        """Run planned committed tokens of all rows in one pass; returns the rows that may draft, and their logits `[N, V]`."""
        inputs: list[RowInput] = []
        drafting: list[_DraftingRow] = []
        for i, span in enumerate(spans):
            if span.draft_catch_up == 0:
                continue
            slot = slots[span.slot]
            length = len(slot.token_ids)
            start = min(self._num_computed[span.slot], length - 1)  # drafting needs the newest token's logits, so it runs again if it must
            end = min(start + span.draft_catch_up, length, self._max_len)
            num_drafts = min(span.draft_budget, self._max_len - length) if end == length else 0
            if end > start:
                inputs.append(RowInput(self._known(slot.token_ids[start:end]), start, slot.page_ids, 1 if num_drafts > 0 else 0))
                self._num_computed[span.slot] = end
            if num_drafts > 0:
                forced = [] if slot.grammar is None else slot.grammar.forced(num_drafts)
                drafting.append(_DraftingRow(i, span.slot, length, num_drafts, forced))
        if not inputs:
            return [], None
        logits = self._forward.run(build_batch(inputs, self._kv.page_size), self._kv).logits
        return drafting, logits if drafting else None

    def _draft(self, spans: Sequence[Span], slots: Mapping[int, Slot], drafting: list[_DraftingRow], logits: torch.Tensor) -> DraftProposal:
        """Draw a draft for every drafting row, run those that are not the row's last, and repeat."""
        rows = sampling_rows(host_rows(spans, slots))
        width = max(row.num_drafts for row in drafting)
        drafts_of: list[list[int]] = [[] for _ in spans]
        probs = torch.zeros((len(spans), width, self._vocab_size)) if self._rule is Rule.RATIO and rows.any_sampled else None
        for position in range(width):
            indices = torch.tensor([row.index for row in drafting])
            if any(slots[row.slot].sampling.adjusts_logits for row in drafting):
                logits = self._adjusted(logits, slots, drafting, [drafts_of[row.index] for row in drafting])
            drawn = self._draw(logits, select_rows(rows, indices, position), indices, position, probs)
            _force(drawn, drafting, position, probs)
            drafts = host_ints(drawn)
            for row, draft in zip(drafting, drafts, strict=True):
                drafts_of[row.index].append(draft)
            going_on = [(row, draft) for row, draft in zip(drafting, drafts, strict=True) if row.num_drafts > position + 1]
            if not going_on:
                break
            inputs = [RowInput(self._known([draft]), row.length + position, slots[row.slot].page_ids, 1) for row, draft in going_on]
            logits = self._forward.run(build_batch(inputs, self._kv.page_size), self._kv).logits
            drafting = [row for row, _ in going_on]
            for row in drafting:
                self._num_computed[row.slot] = row.length + position + 1
        return DraftProposal(drafts_of, probs)

    def _adjusted(
        self, logits: torch.Tensor, slots: Mapping[int, Slot], drafting: list[_DraftingRow], drafts: list[list[int]]
    ) -> torch.Tensor:
        """The draft model's logits under the requests' own options: a draft that these forbid would be lost."""
        rows = [AdjustedRows(i, 1, slots[row.slot], drafts[i], len(drafts[i])) for i, row in enumerate(drafting)]
        return adjust(logits, rows)

    def _draw(
        self, logits: torch.Tensor, rows: SamplingRows, indices: torch.Tensor, position: int, probs: torch.Tensor | None
    ) -> torch.Tensor:
        """The draft tokens `[N]` at one position; q goes into `probs` where the rule wants it."""
        num_shared = min(self._vocab_size, logits.shape[1])  # ids beyond the shorter vocabulary are padding to one of the two models
        shared = logits[:, :num_shared]
        if probs is None:
            return choose(shared, rows)
        drafts, q = draw_drafts(shared, rows)
        probs[indices, position, :num_shared] = q
        return drafts

    def _known(self, token_ids: list[int]) -> list[int]:
        """`token_ids` with those beyond the draft model's embedding replaced by id 0, which costs acceptance and no more."""
        num_ids = self._forward.spec.vocab_size
        if num_ids >= self._vocab_size:
            return token_ids
        return [token_id if token_id < num_ids else 0 for token_id in token_ids]

    @property
    def _max_len(self) -> int:
        return self._forward.spec.max_position_embeddings


def _force(drafts: torch.Tensor, drafting: list[_DraftingRow], position: int, probs: torch.Tensor | None) -> None:
    """Put forced tokens in the place of drawn ones at one position, in `drafts` `[N]` and, with certainty, in q."""
    for i, row in enumerate(drafting):
        if position < len(row.forced):
            drafts[i] = row.forced[position]
            if probs is not None:
                probs[row.index, position] = 0
                probs[row.index, position, row.forced[position]] = 1
