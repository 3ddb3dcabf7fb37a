"""Law tests against a toy: an honest server keeps every law, and each planted fault breaks the one that it is about."""

import math

import pytest

from paceline.prove.certificate.cases import cases, list_text, page_aligned
from paceline.prove.certificate.identity import Arms
from paceline.prove.certificate.law_tests import LawReport, LawTests
from paceline.prove.certificate.options import CertifyOptions
from paceline.prove.results import LawTest
from tests.fakes.toy_completions import ID, Faults, Habits, InProcess, ToyCompletions, tokenize

PROMPT = page_aligned(tuple(tokenize(list_text(0))))
ALPHA = 1e-4  # what Holm leaves a single test at most


async def run(toy: ToyCompletions, *names: str, num_samples: int = 120, has_plain: bool = True) -> LawReport:
    server = InProcess(toy, {"return_token_ids": True})
    plain = server.asking({"max_draft_length": 0}) if has_plain else None
    prompt = list_text(0) if toy.habits.is_foreign else PROMPT
    tests = LawTests(Arms(server, plain), prompt, CertifyOptions(num_samples=num_samples), lambda *_: None)
    return await tests.run([case for case in await tests.cases(ID[" red"]) if not names or case.name in names])


async def one(toy: ToyCompletions, name: str, num_samples: int = 200) -> LawTest:
    (test,) = (await run(toy, name, num_samples=num_samples)).tests
    assert test.num_drafted is not None and test.num_drafted > num_samples / 2, "a draft must have been verified"
    return test


async def test_an_honest_server_keeps_every_law() -> None:
    report = await run(ToyCompletions())
    assert {test.option for test in report.tests} == {case.name for case in cases({}, (), 1)}
    assert min(test.p for test in report.tests) > 0.1 * ALPHA
    assert all(test.num_degrees > 0 for test in report.tests)
    assert not any(test.is_as_without for test in report.tests)
    assert not report.refused and not report.unknown and not report.errors


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p", "temperature", "bad_words", "logit_bias"])
async def test_an_option_that_is_not_applied_to_drafts_is_found(option: str) -> None:
    test = await one(ToyCompletions(Faults(ignores=option)), option)
    assert test.p < ALPHA
    assert test.is_as_without, "and it is said what the samples follow instead"


@pytest.mark.parametrize("option", ["presence_penalty", "frequency_penalty"])
async def test_penalties_that_count_rejected_tokens_are_found(option: str) -> None:
    assert (await one(ToyCompletions(Faults(counts_rejected=True)), option)).p < ALPHA


async def test_a_penalty_without_a_computable_law_is_compared_with_the_plain_arm() -> None:
    broken = await one(ToyCompletions(Faults(ignores="repetition_penalty")), "repetition_penalty", 400)
    assert broken.against == "plain"
    assert broken.p < ALPHA
    report = await run(ToyCompletions(), "repetition_penalty", has_plain=False)
    assert not report.tests
    assert "no plain arm" in report.unknown[0]


async def test_taking_what_is_likely_is_found() -> None:
    """Acceptance by a threshold, which servers offer as typical acceptance."""
    assert (await one(ToyCompletions(Faults(accepts_likely=True)), "sampling")).p < ALPHA


async def test_what_a_foreign_server_refuses_or_lacks_is_said() -> None:
    report = await run(ToyCompletions(habits=Habits(is_foreign=True, refused=("min_p", "logit_bias"))), "min_p", "logit_bias", "top_k")
    assert set(report.refused) == {"min_p", "logit_bias"}
    (test,) = report.tests
    assert (test.option, test.num_drafted) == ("top_k", None)
    assert test.p > ALPHA
    silent = await run(ToyCompletions(habits=Habits(is_foreign=True, has_logprobs=False)), "top_k")
    assert not silent.tests
    assert silent.unknown == ["top_k: there are no samples whose tokens have names"]
    failing = await run(ToyCompletions(habits=Habits(fails_every=4)), "top_k")
    assert failing.errors["HTTP 500: out of order"] > 20


def test_the_prompt_is_whole_pages_and_one_token() -> None:
    assert len(PROMPT) % 16 == 1
    assert PROMPT[-1] == tokenize(list_text(0))[-1]
    assert page_aligned((1, 2, 3)) == (1, 2, 3)
    assert list_text(0) == list_text(0) != list_text(1)


def test_cuts_keep_away_from_tokens() -> None:
    logprobs = {str(rank): value for rank, value in enumerate([-1.0, -1.02, -1.9, -2.0] + [-4.0 - rank / 10 for rank in range(16)])}
    by_name = {case.name: case for case in cases(logprobs, (), None)}
    assert by_name["top_k"].fields == {"top_k": 4}, "between -2.0 and -4.0"
    assert math.exp(-4.0 + 1.0) < by_name["min_p"].options.min_p < math.exp(-2.0 + 1.0)
    assert math.exp(-1.0) < by_name["top_p"].options.top_p < math.exp(-1.0) + math.exp(-1.02)
    assert "logit_bias" not in by_name
