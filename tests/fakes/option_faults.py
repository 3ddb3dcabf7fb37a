"""Faults that one could make in sampling options under speculation, to plant: tests that compare tokens or laws must notice them.

Each takes a monkeypatch and changes the engine until that is undone.
"""

from dataclasses import replace

import pytest
import torch

from paceline.core.draft import DraftProposal
from paceline.core.slot import Slot, TokenCounts
from paceline.executor import step
from paceline.executor.slots import SlotTable
from paceline.speculative import adjust, verify
from paceline.speculative.adjust import AdjustedRows
from paceline.speculative.drafters.draft_model import DraftModelDrafter


def count_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties count drafts that were rejected."""
    proposed: list[list[int]] = []
    honest_cut, honest_commit = step.within_vocabulary, SlotTable.commit

    def within_vocabulary(proposal: DraftProposal, vocab_size: int) -> DraftProposal:
        cut = honest_cut(proposal, vocab_size)
        proposed[:] = cut.drafts_host
        return cut

    def commit(self: SlotTable, plan: object, verification: object) -> list[tuple[int, ...]]:
        new_tokens = honest_commit(self, plan, verification)  # type: ignore[arg-type]
        for span, drafts, new in zip(plan.spans, proposed, new_tokens, strict=True):  # type: ignore[attr-defined]
            counts = self.slots[span.slot].counts
            if counts is not None:
                counts.output.update(drafts[max(len(new) - 1, 0) :])
        return new_tokens

    monkeypatch.setattr(step, "within_vocabulary", within_vocabulary)
    monkeypatch.setattr(SlotTable, "commit", commit)


def one_count_for_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft position sees the committed counts alone."""
    honest = adjust._penalise
    monkeypatch.setattr(adjust, "_penalise", lambda logits, counts, rows: honest(logits, counts, replace(rows, drafts=[], first=0)))


def counts_forget_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties see what stood there at admission."""
    monkeypatch.setattr(Slot, "append", lambda self, token_ids: self.token_ids.extend(token_ids))


def prompt_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repetition penalty looks at the output alone."""
    honest = adjust._penalise
    monkeypatch.setattr(adjust, "_penalise", lambda logits, counts, rows: honest(logits, TokenCounts(frozenset(), counts.output), rows))


def drafts_not_in_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bans and least lengths look at committed tokens alone."""
    honest = adjust._banned
    monkeypatch.setattr(adjust, "_banned", lambda slot, drafts: honest(slot, []))


def bonus_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position behind the last draft goes unadjusted."""

    def rows(start: int, num: int, slot: Slot, drafts: list[int]) -> AdjustedRows:
        return AdjustedRows(start, num - (1 if drafts else 0), slot, drafts)

    monkeypatch.setattr(step, "AdjustedRows", rows)


def target_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter alone knows of the options."""
    monkeypatch.setattr(step, "adjust", lambda logits, rows: logits)


def options_after_temperature(monkeypatch: pytest.MonkeyPatch, temperature: float = 0.9) -> None:
    """Penalties and bias are not divided by it."""
    honest = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, rows: honest(logits / temperature, rows) * temperature)


def law_of_drafts_before_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The q that is handed over is not the one that drafts were drawn from."""
    honest, honest_draw = DraftModelDrafter._adjusted, DraftModelDrafter._draw
    raw: list[torch.Tensor] = []

    def adjusted_and_kept(self: DraftModelDrafter, logits: torch.Tensor, *others: object) -> torch.Tensor:
        raw[:] = [logits]
        return honest(self, logits, *others)  # type: ignore[arg-type]

    def draw(self: DraftModelDrafter, logits: torch.Tensor, *others: object) -> torch.Tensor:
        rows, indices, position, probs = others
        drafts = honest_draw(self, logits, *others)  # type: ignore[arg-type]
        probs[indices, position] = verify.probabilities(raw[0], rows).float()  # type: ignore[index, arg-type]
        return drafts

    monkeypatch.setattr(DraftModelDrafter, "_adjusted", adjusted_and_kept)
    monkeypatch.setattr(DraftModelDrafter, "_draw", draw)


def residual_is_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from p, not from (p - q)+."""
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
