"""The law of every option under `ratio`, exactly: all of scheduler, executor, drafters and sampler, integrated over all of its noise.

No draw is random here. `noise_cells` finds every way in which the uniforms can fall, so a law that is wrong by a thousandth is wrong.
The models are tables; what must come out is said by `slow_sampler`, token by token.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.request import Request, SamplingParams
from paceline.executor.grammar import Grammars
from paceline.speculative.drafter import DRAFTERS
from paceline.speculative.verify import Rule
from tests.fakes import option_faults
from tests.fakes.noise_cells import NoiseCells, integrate
from tests.fakes.slow_sampler import adjusted, slow_law
from tests.fakes.token_engine import FullDraftLength
from tests.fakes.toy_engine import TableForward, ToyEngine, ToyLimits
from tests.fakes.toy_grammar import ALLOWED, ToyGrammar

VOCAB_SIZE = 3
NUM_TOKENS = 4  # one of the prompt's step, then up to three of a step with two drafts, or of two such steps
LIMITS = ToyLimits(max_len=16, max_draft_length=2)
PROMPT = (1, 2, 1, 2, 1)  # not all of the vocabulary, or repetition would not see the drafts
EXACT = 1e-6  # logits are adjusted in single precision
WRONG = 1e-3

WARM = SamplingParams(NUM_TOKENS, temperature=0.9)
OPTIONS = {
    "temperature": replace(WARM, temperature=0.6),
    "top_k": replace(WARM, top_k=2),
    "top_p": replace(WARM, top_p=0.8),
    "min_p": replace(WARM, min_p=0.25),
    "presence": replace(WARM, presence_penalty=1.1),
    "frequency": replace(WARM, frequency_penalty=-0.7),
    "repetition": replace(WARM, repetition_penalty=1.6),
    "logit_bias": replace(WARM, logit_bias=((0, 0.8), (2, -1.2))),
    "bans": replace(WARM, banned_sequences=((0, 0), (2, 1, 0))),
    "stop": replace(WARM, stop_token_ids=(2,)),
    "min_tokens": replace(WARM, stop_token_ids=(2,), min_tokens=3),
    "grammar": replace(WARM, grammar="the toy's"),
    "grammar and penalty": replace(WARM, grammar="the toy's", presence_penalty=1.1, top_k=2),
    "everything": replace(
        WARM,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=0.8,
        logit_bias=((1, 0.7),),
        banned_sequences=((1, 1),),
        stop_token_ids=(0,),
        min_tokens=2,
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the target, and of a drafter that is often but not always right."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn((4, VOCAB_SIZE, VOCAB_SIZE), generator=generator) * 0.8
    return target, target + torch.randn(target.shape, generator=generator) * 0.6


def law_error(draft: str, sampling: SamplingParams, mutate: Callable[[pytest.MonkeyPatch], None] = lambda patch: None) -> float:
    """Total variation between the law of whole answers and the law that the options ask for."""
    target, drafter = tables()

    def run(cells: NoiseCells, num_boxes: int) -> NDArray[np.int64]:
        engine = ToyEngine(TableForward(target), TableForward(drafter), draft, Rule.RATIO, FullDraftLength(0), LIMITS)
        requests = [Request(str(box), PROMPT, replace(sampling, seed=box), 0.0) for box in range(num_boxes)]
        outputs = engine.run(requests)
        drafted.append(engine.stats().num_draft_tokens)
        accepted.append(engine.stats().num_accepted_tokens)
        return np.array([[*tokens, *[-1] * (NUM_TOKENS - len(tokens))] for tokens in outputs])

    drafted: list[int] = []
    accepted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammars, "prepare", lambda *_: None)
        patch.setattr(Grammars, "start", lambda self, text, output: ToyGrammar(output))
        outputs, weights = integrate(patch, run, NUM_TOKENS, lambda patch, cells: mutate(patch))
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    assert draft == "none" or 0 < sum(accepted) < sum(drafted), "drafts were never or always accepted"
    law = wanted_law(target, sampling)
    found = dict.fromkeys(law, 0.0)
    for output, weight in zip(outputs.tolist(), weights, strict=True):
        tokens = tuple(token for token in output if token >= 0)
        found[tokens] = found.get(tokens, 0.0) + float(weight)
    return sum(abs(weight - law.get(tokens, 0.0)) for tokens, weight in found.items()) / 2


def wanted_law(table: torch.Tensor, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer, by enumeration of its beginnings."""
    going_on, ended = {(): 1.0}, dict[tuple[int, ...], float]()
    for _ in range(sampling.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in going_on.items():
            text = (*PROMPT, *output)
            logits = table[(len(text) - 1) % table.shape[0], text[-1]].tolist()
            row = adjusted(logits, PROMPT, output, sampling, sampling.stop_token_ids)
            if sampling.grammar is not None:
                allowed = ALLOWED[output[-1] if output else None]
                row = [score if token in allowed else -math.inf for token, score in enumerate(row)]
            law = slow_law(row, sampling)
            for token, probability in enumerate(law):
                if probability > 0:
                    (ended if token in sampling.stop_token_ids else longer)[*output, token] = mass * probability
        going_on = longer
    return ended | going_on


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_keeps_its_law(draft: str, option: str) -> None:
    assert law_error(draft, OPTIONS[option]) < EXACT


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_a_draft_is_accepted_as_often_as_both_laws_overlap(temperature: float) -> None:
    """One draft from q is accepted with probability sum min(p, q); the sum is over the first token's law too."""
    target, drafter = tables()
    sampling = replace(WARM, max_tokens=3, temperature=temperature)

    def run(cells: NoiseCells, num_boxes: int) -> NDArray[np.int64]:
        engine = ToyEngine(TableForward(target), TableForward(drafter), "draft_model", Rule.RATIO, FullDraftLength(0), LIMITS)
        deltas = engine.deltas([Request(str(box), PROMPT, replace(sampling, seed=box), 0.0) for box in range(num_boxes)])
        assert all(answer[1].num_drafted == 1 for answer in deltas)
        return np.array([len(answer[1].token_ids) - 1 for answer in deltas])

    with pytest.MonkeyPatch.context() as patch:
        accepted, weights = integrate(patch, run, 3)
    expected, place = 0.0, len(PROMPT)
    for first, mass in enumerate(slow_law(target[(place - 1) % 4, PROMPT[-1]].tolist(), sampling)):
        p, q = (slow_law(table[place % 4, first].tolist(), sampling) for table in (target, drafter))
        expected += mass * sum(map(min, p, q))
    assert float((accepted * weights).sum()) == pytest.approx(expected, abs=EXACT)
    assert 0.3 < expected < 0.98


def test_options_differ_from_each_other() -> None:
    """Each option changes the law by more than a fault must to be noticed."""
    laws = [wanted_law(tables()[0], sampling) for sampling in (WARM, *OPTIONS.values())]
    for one, other in itertools.combinations(laws, 2):
        assert sum(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in {**one, **other}) / 2 > 10 * WRONG


@pytest.mark.parametrize(
    ("fault", "option"),
    [
        (option_faults.count_rejected, "frequency"),
        (option_faults.count_rejected, "presence"),
        (option_faults.one_count_for_all_positions, "frequency"),
        (option_faults.one_count_for_all_positions, "repetition"),
        (option_faults.counts_forget_output, "presence"),
        (option_faults.prompt_is_not_repeated, "repetition"),
        (option_faults.drafts_not_in_bans, "bans"),
        (option_faults.drafts_not_in_bans, "min_tokens"),
        (option_faults.bonus_without_options, "logit_bias"),
        (option_faults.bonus_without_options, "frequency"),
        (option_faults.target_without_options, "min_tokens"),
        (option_faults.options_after_temperature, "presence"),
        (option_faults.options_after_temperature, "logit_bias"),
        (option_faults.law_of_drafts_before_options, "logit_bias"),
        (option_faults.residual_is_p, "everything"),
        (option_faults.residual_is_p, "grammar"),
        (option_faults.bonus_without_options, "grammar"),
    ],
)
def test_planted_faults_are_noticed(fault: Callable[[pytest.MonkeyPatch], None], option: str) -> None:
    assert law_error("draft_model", OPTIONS[option], fault) > WRONG
