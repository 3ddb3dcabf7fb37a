"""Prompt lookup: continue as the text did after the longest earlier match of its own end. Needs no model; the default drafter.

Source: Saxena 2023, "Prompt Lookup Decoding". Matches are found with hash chains as in LZ77 compressors.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from paceline.core.draft import DraftProposal
from paceline.core.plan import StepPlan
from paceline.core.slot import Slot
from paceline.core.verification import Verification
from paceline.speculative.drafter import DrafterSetup, proposal_from_lists


class NgramDrafter:
    """Keeps an index of each slot's tokens, built when the slot first may draft and then extended by each step's new tokens."""

    keeps_kv: ClassVar[bool] = False
    needs_hidden: ClassVar[bool] = False
    num_lookahead: ClassVar[int] = 0

    def __init__(self, setup: DrafterSetup) -> None:
        del setup
        self._index_of_slot: dict[int, NgramIndex] = {}

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        # A slot admitted anew holds another text, also when no release came before.
        for slot_id in (*plan.released_slots, *(admission.slot for admission in plan.admitted)):
            self._index_of_slot.pop(slot_id, None)
        drafts: list[list[int]] = []
        for span in plan.spans:
            if span.draft_budget == 0:
                drafts.append([])
                continue
            index = self._index_of_slot.setdefault(span.slot, NgramIndex())
            drafts.append(index.continuation(slots[span.slot].token_ids, span.draft_budget))
        return proposal_from_lists(drafts)

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None:
        pass  # new tokens are read from the slot at the next proposal

    def num_computed_tokens(self, slot: int) -> int:
        return 0


class NgramIndex:
    """Where each n-gram of one growing token list occurred. One dict entry at most and one list entry per token."""

    MIN_MATCH: ClassVar[int] = 2
    """Tokens that must match. On mixed prompts, 5 drafts from matches of 3 and more had 3.0 accepted, of exactly 2 1.3, of 1 only 0.3."""
    MAX_MATCH: ClassVar[int] = 32
    """Longest match that is told apart; longer ones predict no better, and newer ones win among equals."""
    MAX_CANDIDATES: ClassVar[int] = 64
    """Earlier occurrences tried, newest first: bounds the search in texts that repeat one n-gram thousands of times."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its newest occurrence
        self._older: list[int] = []  # position behind an n-gram -> the position behind the occurrence before it; 0: none

    def continuation(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """What followed the longest earlier match of the end of `tokens`, at most `max_tokens`; empty without a match.

        `tokens` must begin with the tokens of the call before. A match that runs into the end is continued periodically.
        """
        self._extend(tokens)
        start = self._longest_match(tokens)
        if start == 0:
            return []
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(max_tokens)]

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token: only those have a continuation."""
        n = self.MIN_MATCH
        for end in range(len(self._older), len(tokens)):
            if end < n:
                self._older.append(0)
                continue
            gram = tuple(tokens[end - n : end])
            self._older.append(self._newest.get(gram, 0))
            self._newest[gram] = end

    def _longest_match(self, tokens: Sequence[int]) -> int:
        """The position behind the longest earlier occurrence of the text's end, the newest among equals; 0 without one."""
        length = len(tokens)
        if length < self.MIN_MATCH:
            return 0
        candidate = self._newest.get(tuple(tokens[length - self.MIN_MATCH :]), 0)
        best, best_match = 0, 0
        for _ in range(self.MAX_CANDIDATES):
            if candidate == 0:
                break
            match = self.MIN_MATCH
            while match < min(candidate, self.MAX_MATCH) and tokens[candidate - 1 - match] == tokens[length - 1 - match]:
                match += 1
            if match > best_match:
                best, best_match = candidate, match
                if match == self.MAX_MATCH:
                    break
            candidate = self._older[candidate]
        return best
