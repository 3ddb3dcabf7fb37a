"""The law of verification: exact integrals over the noise, chi-square tests of the real noise, and planted mutations they must catch."""

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import cast

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from paceline.core.verification import SamplingRows
from paceline.speculative import verify as verify_module
from paceline.speculative.noise import Purpose
from paceline.speculative.verify import Rule, draw_drafts
from tests.fakes.noise_cells import NoiseCells, integrate
from tests.fakes.toy_law import Options, Sequences, ToyDecoder, completed_law, joint_law, law_table, related_table, toy_table

OPTIONS = {
    "temperature": Options(temperature=0.7),
    "top_k": Options(temperature=1.2, top_k=2),
    "top_p": Options(top_p=0.8),
    "min_p": Options(min_p=0.2),
    "all": Options(temperature=1.3, top_k=3, top_p=0.9, min_p=0.1),
}
EXACT = 1e-9
WRONG = 1e-2  # a planted mutation moves more probability than this
MIN_BOXES = 10


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def decoder(vocab_size: int, num_drafts: int, options: Options, rule: Rule = Rule.RATIO, one_hot: bool = False) -> ToyDecoder:
    target = toy_table(vocab_size, seed=vocab_size)
    return ToyDecoder(target, related_table(target, seed=7), options, rule, num_drafts, one_hot)


def two_steps(toy: ToyDecoder) -> Callable[[NoiseCells, int], NDArray[np.int64]]:
    def run(cells: NoiseCells, num_boxes: int) -> NDArray[np.int64]:
        sequences = Sequences.start(num_boxes, 2 * (toy.num_drafts + 1))
        for _ in range(2):
            cells.step_start = sequences.lens
            toy.step(sequences, torch.arange(num_boxes))
        return sequences.outputs()

    return run


def law_error(
    monkeypatch: pytest.MonkeyPatch,
    toy: ToyDecoder,
    mutate: Callable[[pytest.MonkeyPatch, NoiseCells], None] = lambda patch, cells: None,
) -> float:
    """Total variation between the output of two steps, integrated exactly over all uniforms of `ratio`, and the target's law."""
    length = 2 * (toy.num_drafts + 1)
    with monkeypatch.context() as patch:
        outputs, weights = integrate(patch, two_steps(toy), length + 1, mutate)
    assert len(weights) >= MIN_BOXES, "the toy decides too little for its law to mean much"
    assert weights.sum() == pytest.approx(1, abs=EXACT)
    laws = law_table(toy.target, toy.options)
    return float(np.abs(completed_law(outputs, weights, laws, length) - joint_law(laws, length)).sum()) / 2


@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "one-hot"])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(3, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("option", OPTIONS)
def test_ratio_keeps_the_law_exactly(monkeypatch: pytest.MonkeyPatch, option: str, vocab_size: int, num_drafts: int, one_hot: bool) -> None:
    assert law_error(monkeypatch, decoder(vocab_size, num_drafts, OPTIONS[option], one_hot=one_hot)) < EXACT


@pytest.mark.parametrize(("option", "vocab_size", "num_drafts"), [("top_k", 5, 3), ("top_p", 4, 3), ("min_p", 4, 3)])
def test_ratio_keeps_the_law_with_three_drafts(monkeypatch: pytest.MonkeyPatch, option: str, vocab_size: int, num_drafts: int) -> None:
    assert law_error(monkeypatch, decoder(vocab_size, num_drafts, OPTIONS[option])) < EXACT


def test_ratio_keeps_the_law_when_drafting_stops_by_q(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(decoder(3, 2, OPTIONS["temperature"]), trim=lambda q, drafts: q.amax(1) > 0.6)
    assert law_error(monkeypatch, toy) < EXACT


class SharedPurpose(IntEnum):
    """The ledger with one entry used twice."""

    DRAFT = Purpose.DRAFT
    ACCEPT = Purpose.ACCEPT
    RESIDUAL = Purpose.DRAFT
    BONUS = Purpose.BONUS


def test_mutation_draft_and_residual_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "Purpose", SharedPurpose)
    assert law_error(monkeypatch, decoder(3, 2, OPTIONS["temperature"])) > WRONG


def test_mutation_accept_uniform_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch, cells: NoiseCells) -> None:
        def uniforms(seed: torch.Tensor, index: torch.Tensor, purpose: Purpose) -> torch.Tensor:
            return cells.uniforms(seed, cells.step_start[seed] if purpose == Purpose.ACCEPT else index, purpose)

        patch.setattr(verify_module, "uniforms", uniforms)

    assert law_error(monkeypatch, decoder(3, 2, OPTIONS["temperature"]), mutate) > WRONG


def test_mutation_noise_is_named_by_draft_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps see it: the second one then draws with the first one's noise."""

    def mutate(patch: pytest.MonkeyPatch, cells: NoiseCells) -> None:
        patch.setattr(verify_module, "uniforms", lambda seed, index, purpose: cells.uniforms(seed, index - cells.step_start[seed], purpose))

    assert law_error(monkeypatch, decoder(3, 2, OPTIONS["temperature"]), mutate) > WRONG


def test_mutation_residual_is_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "residual", lambda p, q: cast(torch.Tensor, p))
    assert law_error(monkeypatch, decoder(3, 2, OPTIONS["temperature"])) > WRONG


def test_mutation_q_is_taken_before_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, _ = draw_drafts_now(logits, rows)
        return drafts, verify_module.probabilities(logits, replace(rows, top_k=torch.zeros_like(rows.top_k))).float()

    def draw_drafts_now(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_drafts(logits, rows)

    assert law_error(monkeypatch, replace(decoder(4, 2, OPTIONS["top_k"]), draw=draw)) > WRONG


def test_mutation_drafts_are_trimmed_on_the_drawn_token(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(decoder(3, 2, OPTIONS["temperature"]), trim=lambda q, drafts: q.gather(1, drafts.unsqueeze(1)).squeeze(1) > 0.4)
    assert law_error(monkeypatch, toy) > WRONG


NUM_ROWS = 50_000
CHI_SQUARE_CASES = [(rule, option, False) for rule in Rule for option in OPTIONS] + [(Rule.RATIO, "temperature", True)]


@pytest.mark.parametrize(("rule", "option", "one_hot"), CHI_SQUARE_CASES)
def test_chi_square_of_two_tokens(rule: Rule, option: str, one_hot: bool) -> None:
    toy = decoder(6, 2, OPTIONS[option], rule, one_hot)
    p_value, num_accepted = chi_square(toy)
    assert num_accepted > NUM_ROWS // 10, "the drafter must be right often enough for acceptance to matter"
    assert p_value > 1e-4


def test_chi_square_fails_on_a_planted_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "Purpose", SharedPurpose)
    assert chi_square(decoder(6, 2, OPTIONS["temperature"]))[0] < 1e-12


def chi_square(toy: ToyDecoder) -> tuple[float, int]:
    """p-value of the first two tokens of 50,000 requests against the joint law, and how many drafts were accepted at first."""
    sequences = Sequences.start(NUM_ROWS, 2 * (toy.num_drafts + 1))
    seeds = torch.arange(NUM_ROWS) * 0x9E3779B97F4A7C1 + toy.num_drafts  # spread over both key words
    toy.step(sequences, seeds)
    num_accepted = int((sequences.lens - 1).sum())
    short = (sequences.lens < 2).nonzero().squeeze(1)
    rest = Sequences(sequences.tokens[short], sequences.lens[short])
    toy.step(rest, seeds[short])
    sequences.tokens[short], sequences.lens[short] = rest.tokens, rest.lens
    vocab_size = toy.target.shape[0]
    codes = sequences.tokens[:, 2] * vocab_size + sequences.tokens[:, 3]
    counts = np.bincount(codes.numpy(), minlength=vocab_size**2)
    expected = joint_law(law_table(toy.target, toy.options), 2) * NUM_ROWS
    assert counts[expected == 0].sum() == 0, "a token that an option cuts off was emitted"
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    return float(scipy.stats.chisquare(observed[keep], wanted[keep]).pvalue), num_accepted
