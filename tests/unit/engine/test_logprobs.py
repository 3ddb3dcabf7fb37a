"""Reported log-probabilities are those of the raw model, position by position, whatever was drafted, split or preempted."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.core.outcome import TokenDelta, TokenLogprobs
from paceline.core.request import Request, SamplingParams
from paceline.executor import step
from tests.fakes.token_engine import Engine, Models, RandomDraftLength, engine, make_models, requests

OPTIONS = SamplingParams(
    30,
    temperature=0.9,
    top_k=40,
    seed=5,
    ignore_eos=True,
    frequency_penalty=0.5,
    num_logprobs=4,
    num_prompt_logprobs=2,
    stop_token_ids=(7, 90),
)
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@functools.cache
def oracle(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def teacher_forced(models: Models, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities `[T, V]` of every next token by another implementation, in one pass."""
    with torch.inference_mode():
        return oracle(models.target)(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check(reported: TokenLogprobs, law: torch.Tensor, token_id: int, num_top: int) -> None:
    assert reported.logprob == pytest.approx(float(law[token_id]), abs=TOLERANCE)
    assert len(reported.top_token_ids) == len(reported.top_logprobs) == num_top
    assert list(reported.top_logprobs) == sorted(reported.top_logprobs, reverse=True)
    best = law.sort(descending=True).values[:num_top]
    assert torch.tensor(reported.top_logprobs) == pytest.approx(best, abs=TOLERANCE)
    for other, value in zip(reported.top_token_ids, reported.top_logprobs, strict=True):
        assert value == pytest.approx(float(law[other]), abs=TOLERANCE)


def check_output(models: Models, asked: list[Request], answers: list[list[TokenDelta]]) -> None:
    for request, deltas in zip(asked, answers, strict=True):
        tokens = [token for delta in deltas for token in delta.token_ids]
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        laws = teacher_forced(models, [*request.prompt_token_ids, *tokens])
        num_prompt_tokens = len(request.prompt_token_ids)
        assert len(logprobs) == len(tokens), "text and log-probabilities end at the same token"
        for index, token in enumerate(tokens):
            check(logprobs[index], laws[num_prompt_tokens - 1 + index], token, request.sampling.num_logprobs or 0)


def check_prompt(models: Models, asked: list[Request], answers: list[list[TokenDelta]]) -> None:
    for request, deltas in zip(asked, answers, strict=True):
        laws = teacher_forced(models, list(request.prompt_token_ids))
        prompt = deltas[0].prompt_logprobs
        assert len(prompt) == len(request.prompt_token_ids) - 1
        assert not any(delta.prompt_logprobs for delta in deltas[1:])
        for index, token in enumerate(request.prompt_token_ids[1:]):
            check(prompt[index], laws[index], token, 2)


@pytest.mark.parametrize("draft", ["none", "ngram", "draft_model"])
def test_against_a_teacher_forced_pass(models: Models, draft: str) -> None:
    """Twice, so that the second time everything could come from the prefix cache; in small chunks, and with pages too few."""
    facts = Engine(models, engine(draft)).facts
    memory = 22 * (facts.target_page_bytes + facts.drafter_page_bytes)
    config = engine(draft, max_batch_size=6, max_model_len=104, kv_cache_memory_bytes=memory, max_num_batched_tokens=19)
    together = Engine(models, config, RandomDraftLength(1))
    for _ in range(2):
        asked = requests(OPTIONS)
        answers = together.deltas(asked)
        check_output(models, asked, answers)
        check_prompt(models, asked, answers)
    assert together.stats().num_preemptions > 0
    assert draft == "none" or together.stats().num_accepted_tokens > 0


def test_asking_changes_no_token_and_others_pay_nothing(models: Models) -> None:
    mute = replace(OPTIONS, num_logprobs=None, num_prompt_logprobs=None)
    alone = Engine(models, engine("ngram"))
    quiet = alone.deltas(requests(mute))
    assert [[delta.token_ids for delta in deltas] for deltas in quiet] == [
        [delta.token_ids for delta in deltas] for deltas in alone.deltas(requests(OPTIONS))
    ]
    assert not any(delta.logprobs or delta.prompt_logprobs for deltas in quiet for delta in deltas)


def test_zero_alternatives_report_the_chosen_token(models: Models) -> None:
    (deltas,) = Engine(models, engine("none")).deltas(requests(replace(OPTIONS, num_logprobs=0, num_prompt_logprobs=0))[:1])
    assert all(entry.top_token_ids == () for delta in deltas for entry in delta.logprobs)
    assert sum(len(delta.logprobs) for delta in deltas) == sum(len(delta.token_ids) for delta in deltas)


def after_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step.token_logprobs
    monkeypatch.setattr(step, "token_logprobs", lambda logits, tokens, num_top: honest(logits / OPTIONS.temperature, tokens, num_top))


def after_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options change the raw logits themselves, which are reported later."""
    honest = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, rows: logits.copy_(honest(logits, rows)))


def of_the_draft_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position of a step reports what the model said of the step's first token."""
    honest = step.token_logprobs
    monkeypatch.setattr(step, "token_logprobs", lambda logits, tokens, num_top: honest(logits[:1].expand_as(logits), tokens, num_top))


@pytest.mark.parametrize("fault", [after_temperature, after_penalties, of_the_draft_before])
def test_planted_faults_are_noticed(models: Models, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    fault(monkeypatch)
    asked = requests(replace(OPTIONS, num_prompt_logprobs=None))
    answers = Engine(models, engine("draft_model")).deltas(asked)
    with pytest.raises(AssertionError):
        check_output(models, asked, answers)
