"""Penalties, bias and bans on logits: what each position sees, and that rows which ask for nothing keep their bits."""

import random

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.speculative.adjust import BANNED, AdjustedRows, adjust

VOCAB_SIZE = 50


def slot_of(output: list[int], prompt: tuple[int, ...] = (1, 2, 2, 3), stop_token_ids: tuple[int, ...] = (), **options: object) -> Slot:
    sampling = SamplingParams(99, temperature=0.0, **options)  # type: ignore[arg-type]
    return Slot([*prompt, *output], len(prompt), sampling, [], 0, stop_token_ids)


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def test_rows_that_ask_for_nothing_are_the_same_object() -> None:
    logits = logits_of(3)
    assert adjust(logits, [AdjustedRows(0, 3, slot_of([5]), [7, 8])]) is logits


def test_only_asking_rows_change_and_the_raw_logits_stay() -> None:
    logits = logits_of(5)
    before = logits.clone()
    rows = [
        AdjustedRows(0, 2, slot_of([5]), [7]),
        AdjustedRows(2, 2, slot_of([5], frequency_penalty=1.0), [7]),
        AdjustedRows(4, 1, slot_of([5]), []),
    ]
    adjusted = adjust(logits, rows)
    assert torch.equal(logits, before)
    assert torch.equal(adjusted[[0, 1, 4]], logits[[0, 1, 4]])
    changed = (adjusted != logits).nonzero().tolist()
    assert changed == [[2, 5], [3, 5], [3, 7]]


def test_each_position_counts_the_drafts_before_it() -> None:
    logits = logits_of(4)
    slot = slot_of([5, 5, 6], frequency_penalty=0.5, presence_penalty=0.25)
    adjusted = adjust(logits, [AdjustedRows(0, 4, slot, [5, 9, 9])])
    taken = logits - adjusted
    assert taken[:, 5].tolist() == pytest.approx([1.25, 1.75, 1.75, 1.75], abs=1e-5)
    assert taken[:, 9].tolist() == pytest.approx([0, 0, 0.75, 1.25], abs=1e-5)
    assert taken[:, 2].tolist() == [0] * 4, "the prompt is not counted"


def test_repetition_also_looks_at_the_prompt() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0, 1.0] + [0.5] * (VOCAB_SIZE - 5)] * 2)
    adjusted = adjust(logits, [AdjustedRows(0, 2, slot_of([0], prompt=(1, 2), repetition_penalty=2.0), [3])])
    assert adjusted[0, :5].tolist() == [1.0, -4.0, 2.0, -4.0, 1.0]
    assert adjusted[1, :5].tolist() == [1.0, -4.0, 2.0, -8.0, 1.0]


def test_a_later_position_alone_is_the_same_row() -> None:
    """A drafter asks for one position at a time."""
    slot = slot_of([5, 6], frequency_penalty=0.5, repetition_penalty=1.2, banned_sequences=((7, 8),), logit_bias=((3, 1.5),))
    logits = logits_of(3)
    together = adjust(logits, [AdjustedRows(0, 3, slot, [7, 5])])
    for position in range(3):
        alone = adjust(logits[position : position + 1], [AdjustedRows(0, 1, slot, [7, 5][:position], position)])
        assert torch.equal(alone[0], together[position])


def test_banned_sequences_look_back_over_output_and_drafts() -> None:
    slot = slot_of([5, 6], banned_sequences=((5, 6, 7), (6, 8), (7, 7), (9,), (3, 5)))
    adjusted = adjust(logits_of(3), [AdjustedRows(0, 3, slot, [7, 7])])
    banned = [sorted(row.nonzero().flatten().tolist()) for row in adjusted == BANNED]
    assert banned == [[7, 8, 9], [7, 9], [7, 9]], "(3, 5) begins in the prompt"


def test_too_short_answers_may_not_end() -> None:
    slot = slot_of([5], stop_token_ids=(4, 11), min_tokens=3)
    adjusted = adjust(logits_of(4), [AdjustedRows(0, 4, slot, [1, 1, 1])])
    assert [(row == BANNED).nonzero().flatten().tolist() for row in adjusted] == [[4, 11], [4, 11], [], []]


def test_everything_banned_still_is_a_law() -> None:
    adjusted = adjust(logits_of(1), [AdjustedRows(0, 1, slot_of([], banned_sequences=tuple((i,) for i in range(VOCAB_SIZE))), [])])
    assert torch.isfinite(adjusted).all()


def test_ids_beyond_a_shorter_vocabulary_are_passed_over() -> None:
    options = {"logit_bias": ((49, 2.0), (10, 1.0)), "banned_sequences": ((48,),), "frequency_penalty": 1.0, "min_tokens": 9}
    slot = slot_of([47, 5], prompt=(46, 2), stop_token_ids=(45, 6), repetition_penalty=1.5, **options)
    logits = logits_of(2)
    short = adjust(logits[:, :30].contiguous(), [AdjustedRows(0, 2, slot, [44])])
    assert torch.equal(short, adjust(logits, [AdjustedRows(0, 2, slot, [44])])[:, :30])


def test_counts_follow_the_committed_tokens() -> None:
    rng = random.Random(1)
    slot = slot_of([4], frequency_penalty=1.0)
    for _ in range(20):
        slot.append([rng.randrange(9) for _ in range(rng.randrange(1, 4))])
    fresh = Slot(list(slot.token_ids), slot.num_prompt_tokens, slot.sampling, [], 0)
    assert slot.counts == fresh.counts
    assert slot.counts is not None
    assert slot.counts.output.total() == slot.num_output_tokens
