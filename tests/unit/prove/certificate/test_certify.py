"""The whole certificate over a socket, and the sentences it ends in."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import BadInputError, MissingError
from paceline.prove.certificate.certify import certify
from paceline.prove.certificate.options import CertifyOptions
from paceline.prove.certificate.text import certificate_lines
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.journal import Journal, read_journal
from paceline.prove.recorded import note_exchange
from paceline.prove.results import Certificate
from tests.fakes.toy_completions import Faults, Habits, ToyCompletions, serve_toy

PROMPTS = [Prompt(f"q{index}", "qa", (text,)) for index, text in enumerate(("What is a heap?", "Tell me of the sea.", "Who?", "Why?"))]
QUICK = {"num_prompts": 2, "max_tokens": 16}


async def certified(toy: ToyCompletions, num_samples: int = 0, **more: object) -> Certificate:
    async with serve_toy(toy) as url:
        return await certify(f"{url}/v1/", PROMPTS, CertifyOptions(num_samples=num_samples, **QUICK, **more))  # type: ignore[arg-type]


async def test_an_honest_server_gets_it() -> None:
    certificate = await certified(ToyCompletions(), num_samples=50)
    assert certificate.holds is True
    assert certificate.greedy_identical is certificate.seeded_identical is True
    assert certificate.num_compared == 2 * 4
    assert certificate.plain == "max_draft_length 0 on the same server"
    assert len(certificate.law_tests) == 10
    assert {test.is_broken for test in certificate.law_tests} == {False}
    assert sum(test.threshold for test in certificate.law_tests) >= certificate.alpha
    text = "\n".join(certificate_lines(certificate))
    assert "The certificate holds" in text
    assert "repetition_penalty" in text


async def test_every_completion_is_kept_as_it_was_asked_for_and_answered(tmp_path: Path) -> None:
    toy = ToyCompletions()
    num_asked = 0
    handle = toy.handle

    def counted(path: str, body: Any) -> Any:
        nonlocal num_asked
        num_asked += path == "/v1/completions"
        return handle(path, body)

    toy.handle = counted  # type: ignore[method-assign]
    with Journal(tmp_path / "raw.jsonl") as journal:
        async with serve_toy(toy) as url:
            await certify(url, PROMPTS, CertifyOptions(num_samples=12, **QUICK), keep=partial(note_exchange, journal))  # type: ignore[arg-type]
    notes = read_journal(tmp_path / "raw.jsonl").notes
    kept: list[Any] = [note["certificate_request"] for note in notes]
    assert len(kept) == num_asked > 11 * 12
    samples = [one for one in kept if one["body"].get("presence_penalty")]
    assert len(samples) == 12
    assert len({one["body"]["seed"] for one in samples}) == 12
    assert all(one["answer"]["token_ids"] and one["sent_s"] <= one["end_s"] for one in samples)


async def test_a_broken_law_and_a_wrong_token_are_sentences() -> None:
    certificate = await certified(ToyCompletions(Faults(ignores="top_p", wrong_at=5)), num_samples=60)
    assert certificate.holds is False
    (sentence,) = [sentence for sentence in certificate.broken if sentence.startswith("top_p does not keep its law")]
    assert sentence.endswith("they follow the law without it")
    assert any("at token 5" in sentence and "no near tie" in sentence for sentence in certificate.broken)
    assert [test.option for test in certificate.law_tests if test.is_broken] == ["top_p"]
    text = "\n".join(certificate_lines(certificate))
    assert "does not hold" in text
    assert "  BROKEN" in text


async def test_a_near_tie_breaks_nothing() -> None:
    certificate = await certified(ToyCompletions(Faults(flips_near_ties=True)))
    assert certificate.greedy_identical is False
    assert not certificate.broken
    assert "near tie" in "\n".join(certificate_lines(certificate))


async def test_another_server_is_compared_with_itself_or_with_a_second_one() -> None:
    certificate = await certified(ToyCompletions(habits=Habits(is_foreign=True)))
    assert certificate.plain == "one token a request"
    assert certificate.greedy_identical is True
    assert certificate.seeded_identical is None
    assert certificate.holds is None
    async with serve_toy(ToyCompletions()) as baseline_url:
        certificate = await certified(ToyCompletions(Faults(accepts_likely=True), Habits(is_foreign=True)), baseline_url=baseline_url)
    assert certificate.plain == f"the server at {baseline_url}"
    assert (certificate.greedy_identical, certificate.seeded_identical) == (True, False)


async def test_a_server_that_never_drafts_proves_nothing() -> None:
    async with serve_toy(ToyCompletions()) as baseline_url:
        toy = ToyCompletions()
        toy.draft_length_limit = 0
        certificate = await certified(toy, baseline_url=baseline_url)
    assert certificate.holds is None
    assert certificate.unknown == ("no draft was verified in any compared answer: speculation is off, or its drafter found nothing",)


async def test_faults_of_a_server_are_told_not_raised() -> None:
    certificate = await certified(ToyCompletions(habits=Habits(fails_every=2)), num_samples=40)
    assert certificate.holds is False
    assert any("HTTP 500: out of order" in sentence for sentence in certificate.broken)


async def test_no_server_is_an_error() -> None:
    with pytest.raises(MissingError, match="no server answers at http"):
        await certify("http://127.0.0.1:9", PROMPTS)
    with pytest.raises(BadInputError, match="alpha is 2"):
        CertifyOptions(alpha=2)
