"""Ruling tokens out in C never changes a choice: against noise for the whole vocabulary, in torch."""

import pytest
import torch

from paceline.core.verification import SamplingRows
from paceline.native import library
from paceline.speculative import verify as verify_module
from paceline.speculative.contenders import find_contenders
from paceline.speculative.noise import gumbel_all
from paceline.speculative.verify import choose

pytestmark = pytest.mark.skipif(isinstance(library.load(), str), reason="the native library is not built")


def _rows(temperatures: list[float], seeds: list[int], min_p: float = 0.0) -> SamplingRows:
    n = len(temperatures)
    return SamplingRows(
        temperature=torch.tensor(temperatures),
        top_k=torch.zeros(n, dtype=torch.int64),
        top_p=torch.ones(n),
        min_p=torch.full((n,), min_p),
        seed=torch.tensor(seeds),
        output_index=torch.arange(n) * 3,
        emits=torch.ones(n, dtype=torch.bool),
        any_sampled=True,
    )


def _logits(n: int, vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _by_noise_for_all(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    scores = logits.double() / rows.temperature.double().unsqueeze(1)
    return scores.add_(gumbel_all(rows.seed, rows.output_index, logits.shape[1])).argmax(1)


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 17, 50, 1000, 4099])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
def test_the_choice_is_that_of_noise_for_the_whole_vocabulary(vocab_size: int, spread: float) -> None:
    for seed in range(8):
        rows = _rows([0.05, 0.7, 1.0, 3.0], [seed, -seed - 1, 1 << 62, seed * 977])
        logits = _logits(4, vocab_size, spread, seed)
        found = find_contenders(logits, rows)
        assert found is not None
        chosen = _by_noise_for_all(logits, rows)
        assert all(int(token) in ids for token, ids in zip(chosen, found, strict=True))
        assert all(len(ids) <= 2 for ids in found), "noise of two tokens ties about never"
        assert torch.equal(choose(logits, rows), chosen)


def test_banned_and_biased_tokens_are_ruled_out_or_in() -> None:
    rows = _rows([1.0], [5])
    logits = _logits(1, 200, 2.0, 0)
    logits[0, 7:] = -1e30
    logits[0, 3] = -2e30
    found = find_contenders(logits, rows)
    assert found is not None
    assert set(found[0]) <= {0, 1, 2, 4, 5, 6}
    assert torch.equal(choose(logits, rows), _by_noise_for_all(logits, rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_left_to_torch(value: float) -> None:
    logits = _logits(1, 100, 1.0, 0)
    logits[0, 50] = value
    assert find_contenders(logits, _rows([1.0], [0])) is None


def test_min_p_is_left_to_torch() -> None:
    assert find_contenders(_logits(1, 100, 1.0, 0), _rows([1.0], [0], min_p=0.1)) is None


def test_a_wrong_contender_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = _rows([1.0], [3]), _logits(1, 500, 2.0, 1)
    chosen = _by_noise_for_all(logits, rows)
    monkeypatch.setattr(verify_module, "find_contenders", lambda *_: [[(int(chosen[0]) + 1) % 500]])
    assert not torch.equal(choose(logits, rows), chosen)
