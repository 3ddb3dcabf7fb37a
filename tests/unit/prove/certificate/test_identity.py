"""Tokens of both arms against a toy: the honest one is identical, and each planted fault is found where it is."""

import pytest

from paceline.prove.certificate.identity import Arms, Comparison, Question, compare
from paceline.prove.certificate.options import CertifyOptions
from tests.fakes.toy_completions import Faults, Habits, InProcess, ToyCompletions, tokenize

TEXTS = ("Colours: red, blue, green, red, blue,", "What is a heap?", "Colours: white, black, white, black, red, white,")
OPTIONS = CertifyOptions(max_tokens=24)


async def compared(kind: str, toy: ToyCompletions, has_plain: bool = True, has_ids: bool = True) -> Comparison:
    server = InProcess(toy, {"return_token_ids": True})
    questions = [Question(f"q{index}", tuple(tokenize(text)) if has_ids else text) for index, text in enumerate(TEXTS)]
    plain = server.asking({"max_draft_length": 0}) if has_plain else None
    return await compare(kind, Arms(server, plain), questions, OPTIONS, lambda *_: None)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_an_honest_server_is_identical(kind: str) -> None:
    found = await compared(kind, ToyCompletions())
    assert found.is_identical is True
    assert found.num_compared == len(TEXTS)
    assert found.num_draft_tokens is not None and found.num_draft_tokens > 20, "or nothing was compared"
    assert not found.errors


async def test_a_wrong_token_is_found_at_its_place() -> None:
    found = await compared("greedy", ToyCompletions(Faults(wrong_at=7)))
    assert found.is_identical is False
    for divergence in found.divergences:
        assert divergence.position == 7
        assert divergence.is_near_tie is False
        assert divergence.top2_gap is not None and divergence.top2_gap > 1
        assert divergence.tokens[0] != divergence.tokens[1]


async def test_a_near_tie_is_called_one() -> None:
    """Red and blue are 0.02 nats apart, below the stated 0.15."""
    found = await compared("greedy", ToyCompletions(Faults(flips_near_ties=True)))
    assert [divergence.is_near_tie for divergence in found.divergences] == [True] * len(found.divergences)
    assert {divergence.question_id for divergence in found.divergences} >= {"q0", "q2"}
    (first, *_) = found.divergences
    assert first.tokens == (" red", " blue")
    assert first.top2_gap == pytest.approx(0.02, abs=1e-6)


async def test_a_biased_sampler_is_found_and_its_ties_are_not_guessed() -> None:
    found = await compared("seeded", ToyCompletions(Faults(accepts_likely=True)))
    assert found.is_identical is False
    assert {divergence.is_near_tie for divergence in found.divergences} == {None}


@pytest.mark.parametrize("has_logprobs", [True, False])
async def test_a_server_without_a_plain_arm_is_asked_one_token_at_a_time(has_logprobs: bool) -> None:
    """Text only, as some servers have it; without log-probabilities characters are compared."""
    habits = Habits(is_foreign=True, has_logprobs=has_logprobs)
    toy = ToyCompletions(habits=habits)
    found = await compared("greedy", toy, has_plain=False, has_ids=False)
    assert found.is_identical is True
    assert found.num_draft_tokens is None
    assert toy.num_completions > len(TEXTS) * OPTIONS.max_tokens
    broken = await compared("greedy", ToyCompletions(Faults(wrong_at=7), habits), has_plain=False, has_ids=False)
    assert broken.is_identical is False
    assert all(divergence.is_near_tie is (False if has_logprobs else None) for divergence in broken.divergences)


async def test_a_server_that_fails_is_told_of() -> None:
    found = await compared("greedy", ToyCompletions(habits=Habits(fails_every=1)))
    assert found.is_identical is None
    assert found.errors == {"HTTP 500: out of order": len(TEXTS)}
