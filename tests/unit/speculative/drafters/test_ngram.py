"""Prompt lookup: which match wins, what it proposes, and that its index grows with the text and no further."""

import random

import pytest

from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.speculative.drafter import DrafterSetup
from paceline.speculative.drafters.ngram import NgramDrafter, NgramIndex, predicted_start
from paceline.speculative.verify import Rule
from tests.fakes.drafter_driver import DrafterDriver, Work
from tests.fakes.toy_forward import ToyForward


def continuation(tokens: list[int], max_tokens: int = 3) -> list[int]:
    return NgramIndex().continuation(tokens, max_tokens)


def brute_force(tokens: list[int], max_tokens: int) -> list[int]:
    """The same rule without an index: longest match up to MAX_MATCH, newest among equals, then what followed, periodically."""
    best, best_match = 0, NgramIndex.MIN_MATCH - 1
    for end in range(len(tokens) - 1, 0, -1):
        match = 0
        while match < min(end, NgramIndex.MAX_MATCH) and tokens[end - 1 - match] == tokens[len(tokens) - 1 - match]:
            match += 1
        if match > best_match:
            best, best_match = end, match
    return [tokens[best + i % (len(tokens) - best)] for i in range(max_tokens)] if best else []


def test_it_proposes_what_followed() -> None:
    assert continuation([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]


def test_no_match_proposes_nothing() -> None:
    assert continuation([1, 2, 3, 4]) == []
    assert continuation([1]) == []
    assert continuation([1, 1]) == []
    assert continuation([3, 1, 2, 1]) == [], "one token is not a match"


def test_the_longest_match_wins_over_a_newer_one() -> None:
    assert continuation([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], 1) == [30]


def test_the_newest_of_equal_matches_wins() -> None:
    assert continuation([1, 2, 30, 1, 2, 40, 9, 1, 2], 1) == [40]


def test_a_match_that_reaches_the_end_goes_on_periodically() -> None:
    assert continuation([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert continuation([4, 4, 4], 4) == [4, 4, 4, 4]
    assert continuation([1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_growing_text_equals_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramIndex, "MAX_CANDIDATES", 10_000)
    monkeypatch.setattr(NgramIndex, "MAX_MATCH", 6)
    rng = random.Random(seed)
    tokens, index = [rng.randrange(3)], NgramIndex()
    while len(tokens) < 150:
        assert index.continuation(tokens, 4) == brute_force(tokens, 4)
        tokens += [rng.randrange(1 + seed % 4) for _ in range(rng.randrange(1, 5))]


def test_the_search_is_bounded_in_monotonous_text() -> None:
    tokens = [1, 2] * 50 + [3] + [1, 2] * 4_000
    index = NgramIndex()
    assert index.continuation(tokens, 2) == [1, 2]


def test_work_and_memory_follow_the_new_tokens_only() -> None:
    index, tokens = NgramIndex(), list(range(5_000))
    index.continuation(tokens, 3)
    given, index._tokens = CountingList([*tokens, 0, 1]), CountingList(index._tokens)
    assert index.continuation(given, 3) == [2, 3, 4]
    assert given.num_reads + index._tokens.num_reads < 20
    assert len(index._older) == len(given)
    assert len(index._newest) <= len(given)


class CountingList(list[int]):
    """Counts element and slice reads."""

    num_reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def, override]
        self.num_reads += 1
        return super().__getitem__(key)


def test_copying_is_accepted() -> None:
    """A target that continues periodically accepts whole proposals."""
    driver = DrafterDriver(NgramDrafter(DrafterSetup(Rule.COUPLED, 10)), PeriodicTarget(10), Rule.COUPLED, page_size=4, num_pages=50)
    driver.admit(0, [1, 2, 3, 4, 5, 6, 7, 1, 2], SamplingParams(max_tokens=100, temperature=0.0))
    proposal = driver.step([Work(0, draft_budget=5)])
    assert proposal.token_ids.tolist() == [[3, 4, 5, 6, 7]]
    assert proposal.probs is None
    assert driver.slots[0].token_ids[9:] == [3, 4, 5, 6, 7, 1]


class PeriodicTarget(ToyForward):
    """Counts 1..7 and begins again."""

    def prefix_logits(self, token_ids):  # type: ignore[no-untyped-def, override]
        logits = self.table[0] * 0
        logits[token_ids[-1] % 7 + 1] = 1.0
        return logits


def test_released_slots_are_forgotten() -> None:
    drafter = NgramDrafter(DrafterSetup(Rule.COUPLED, 10))
    driver = DrafterDriver(drafter, PeriodicTarget(10), Rule.COUPLED, page_size=4, num_pages=50)
    for slot in range(3):
        driver.admit(slot, [1, 2, 1, 2], SamplingParams(max_tokens=100, temperature=0.0))
    driver.step([Work(slot, draft_budget=2) for slot in range(3)])
    assert len(drafter._index_of_slot) == 3
    driver.release(1)
    driver.step([])
    assert sorted(drafter._index_of_slot) == [0, 2]


def with_prediction(prediction: list[int], tokens: list[int], max_tokens: int) -> list[int]:
    return NgramIndex(prediction).continuation(tokens, max_tokens)


def test_a_predicted_output_is_looked_up() -> None:
    assert with_prediction([10, 11, 12, 13, 14], [1, 2, 10, 11], 2) == [12, 13]
    assert with_prediction([10, 11, 12, 13, 14], [1, 2, 99, 12, 13], 5) == [14], "it ends where the prediction ends"
    assert with_prediction([10, 11, 12], [1, 2, 11, 12], 3) == []
    assert with_prediction([10, 11, 12], [5], 3) == []


def test_among_equal_matches_the_prediction_wins() -> None:
    tokens = [10, 11, 50, 51, 10, 11]
    assert NgramIndex().continuation(tokens, 1) == [50]
    assert with_prediction([10, 11, 12], tokens, 1) == [12]
    assert with_prediction([7, 11, 12, 10, 11, 13], [9, 10, 11, 50, 9, 10, 11], 1) == [50], "a longer match wins over it"


def test_an_index_with_a_prediction_grows_as_one_without() -> None:
    rng = random.Random(4)
    index, tokens = NgramIndex([7, 8, 9]), [rng.randrange(3)]
    for _ in range(300):
        assert index.continuation(tokens, 4) == NgramIndex([7, 8, 9]).continuation(tokens, 4) == NgramIndex().continuation(tokens, 4)
        tokens.append(rng.randrange(3))


def test_the_prediction_is_proposed_from_the_first_token_on() -> None:
    """A request whose prompt says nothing of its answer still drafts at once, and goes on after a word that was not foreseen."""
    drafter = NgramDrafter(DrafterSetup(Rule.COUPLED, 10))
    driver = DrafterDriver(drafter, PeriodicTarget(10), Rule.COUPLED, page_size=4, num_pages=50)
    driver.admit(0, [9, 5], SamplingParams(max_tokens=100, temperature=0.0), num_prompt_tokens=1, prediction=(5, 6, 7, 1, 3, 4, 5))
    assert driver.step([Work(0, draft_budget=3)]).token_ids.tolist() == [[6, 7, 1]]
    assert driver.slots[0].token_ids == [9, 5, 6, 7, 1, 2], "2 came, not 3"
    driver.step([Work(0, draft_budget=3)])
    driver.step([Work(0, draft_budget=3)])
    assert driver.slots[0].token_ids[-2:] == [3, 4]
    assert driver.step([Work(0, draft_budget=3)]).token_ids.tolist() == [[5]]


def test_a_start_that_differs_is_not_followed() -> None:
    slot = Slot([9, 4], 1, SamplingParams(9, temperature=0.0), [], 0, prediction_token_ids=(5, 6))
    assert predicted_start(slot, 3) == []
