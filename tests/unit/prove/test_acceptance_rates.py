"""Acceptance from counts: both poolings, and positions that not every step drafted."""

import numpy as np
import pytest

from paceline.prove.acceptance_rates import acceptance_length, conditional_acceptance, joint_acceptance
from paceline.prove.record import Acceptance
from tests.fakes.answers import answer

HAZARDS = np.array([0.8, 0.7, 0.6])


def histogram_of(rng: np.random.Generator, num_steps: int, length: int) -> tuple[int, ...]:
    accepted = np.cumprod(rng.random((num_steps, length)) < HAZARDS[:length], axis=1).sum(axis=1)
    return tuple(int(count) for count in np.bincount(accepted, minlength=length + 1))


def told_of(length: int, histogram: tuple[int, ...], num_draft_tokens: int | None = None) -> Acceptance:
    num_steps = sum(histogram)
    drafted = length * num_steps if num_draft_tokens is None else num_draft_tokens
    return Acceptance(num_steps, drafted, sum(index * count for index, count in enumerate(histogram)), histogram)


def test_the_two_poolings_of_acceptance_length() -> None:
    """One step that accepted 3, and nine that accepted nothing: 4 and 1 as means, 13 tokens in 10 steps."""
    records = [answer(acceptance=told_of(3, (0, 0, 0, 1))), answer(acceptance=told_of(3, (9, 0, 0, 0))), answer()]
    found = acceptance_length(records)
    assert found is not None
    assert found.mean_of_means == pytest.approx(2.5)
    assert found.token_weighted == pytest.approx(1.3)
    assert acceptance_length([answer()]) is None
    assert acceptance_length([answer(acceptance=told_of(3, (0, 0, 0, 0)))]) is None


def test_known_law_is_recovered() -> None:
    rng = np.random.default_rng(0)
    records = [answer(acceptance=told_of(3, histogram_of(rng, 500, 3))) for _ in range(40)]
    conditional = conditional_acceptance(records)
    assert conditional == pytest.approx(tuple(HAZARDS), abs=0.015)
    assert joint_acceptance(conditional) == pytest.approx(tuple(np.cumprod(HAZARDS)), abs=0.015)
    found = acceptance_length(records)
    assert found is not None
    assert found.token_weighted == pytest.approx(1 + np.cumprod(HAZARDS).sum(), abs=0.03)


def test_a_step_that_drafted_less_says_nothing_of_later_positions() -> None:
    """Half of the requests draft one token only. Counted as rejections of the second, the rate there would be about half."""
    rng = np.random.default_rng(1)
    full = [answer(acceptance=told_of(3, histogram_of(rng, 500, 3))) for _ in range(20)]
    short = [answer(acceptance=told_of(1, (*histogram_of(rng, 500, 1), 0, 0))) for _ in range(20)]
    assert conditional_acceptance([*full, *short]) == pytest.approx(tuple(HAZARDS), abs=0.03)
    uncensored = [answer(acceptance=told_of(3, record.acceptance.histogram)) for record in short if record.acceptance]
    assert conditional_acceptance([*full, *uncensored])[1] < 0.5


def test_lengths_that_vary_within_a_request_do_not_make_late_positions_perfect() -> None:
    """One to three drafts a step, as a text match gives: their mean is 2, yet three were accepted at times."""
    rng = np.random.default_rng(3)
    histograms = [(*histogram_of(rng, 4000, length), *(0,) * (3 - length)) for length in (1, 2, 3)]
    pooled = tuple(sum(counts) for counts in zip(*histograms, strict=True))
    found = conditional_acceptance([answer(acceptance=told_of(3, pooled, 2 * sum(pooled)))])
    assert found == pytest.approx(tuple(HAZARDS), abs=0.04)


def test_counts_by_draft_length_are_exact() -> None:
    rng = np.random.default_rng(2)
    by_length = tuple((length, histogram_of(rng, 6000, length)) for length in (1, 3))
    pooled = tuple(sum(histogram[index] for _, histogram in by_length if index < len(histogram)) for index in range(4))
    drafted = sum(length * sum(histogram) for length, histogram in by_length)
    plain = told_of(3, pooled, drafted)
    exact = Acceptance(plain.num_spec_steps, drafted, plain.num_accepted_draft_tokens, pooled, histograms_by_draft_length=by_length)
    assert conditional_acceptance([answer(acceptance=exact)]) == pytest.approx(tuple(HAZARDS), abs=0.03)


def test_a_length_that_no_step_accepted_leaves_no_gap() -> None:
    assert conditional_acceptance([answer(acceptance=told_of(3, (2, 0, 0, 2)))]) == (0.5, 1.0, 1.0)
    assert conditional_acceptance([answer(acceptance=told_of(2, (5, 0, 0)))]) == (0.0,)
    assert conditional_acceptance([answer()]) == ()
