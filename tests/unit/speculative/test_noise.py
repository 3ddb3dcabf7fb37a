"""The noise: Random123's known answers, one value however it is asked for, uniform and within its stated range."""

import math

import pytest
import scipy.stats
import torch

from paceline.speculative import noise
from paceline.speculative.noise import NOISE_SPREAD, Purpose, gumbel, gumbel_all, philox4x32, uniforms

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> torch.Tensor:
    return torch.tensor([[int(word, 16)] for word in text.split()])


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert philox4x32(words(counter)[0::2], words(counter)[1::2], words(key)).tolist() == [words(result).flatten().tolist()]


def test_philox_of_many_counters_equals_one_at_a_time() -> None:
    even = torch.randint(0, 1 << 32, (2, 37))
    odd = torch.randint(0, 1 << 32, (2, 37))
    key = torch.randint(0, 1 << 32, (2, 37))
    alone = [philox4x32(even[:, i : i + 1], odd[:, i : i + 1], key[:, i : i + 1]) for i in range(37)]
    assert torch.equal(philox4x32(even, odd, key), torch.cat(alone))


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 7, 64, 1001])
def test_noise_of_a_token_does_not_depend_on_how_it_is_asked_for(vocab_size: int) -> None:
    seed, index = torch.tensor([5, -1, 1 << 40]), torch.tensor([0, 9, 70000])
    every = gumbel_all(seed, index, vocab_size)
    ids = torch.arange(vocab_size)
    for row in range(3):
        assert torch.equal(every[row], gumbel(seed[row].expand(vocab_size), index[row].expand(vocab_size), ids))
        assert torch.equal(every[row : row + 1], gumbel_all(seed[row : row + 1], index[row : row + 1], vocab_size))
    some = torch.randperm(vocab_size)[:3]
    assert torch.equal(every[1, some], gumbel(seed[1].expand(some.numel()), index[1].expand(some.numel()), some))
    assert torch.equal(every[:, : vocab_size // 2], gumbel_all(seed, index, vocab_size)[:, : vocab_size // 2])


def test_every_part_of_the_name_changes_the_draw() -> None:
    base = {"seed": 3, "index": 4, "purpose": Purpose.ACCEPT}
    draws = {
        float(uniforms(torch.tensor([seed]), torch.tensor([index]), purpose))
        for seed in (3, 4, 3 + (1 << 32), 3 - (1 << 63))  # the last two differ from the first in the high word only
        for index in (4, 5)
        for purpose in Purpose
    }
    assert len(draws) == 4 * 2 * len(Purpose), base
    assert gumbel_all(torch.tensor([3]), torch.tensor([4]), 1000).unique().numel() == 1000


def test_uniforms_are_uniform_for_neighbouring_names() -> None:
    index = torch.arange(50_000)
    for draws in (
        uniforms(torch.zeros_like(index), index, Purpose.DRAFT),
        uniforms(index, torch.zeros_like(index), Purpose.DRAFT),
    ):
        assert scipy.stats.kstest(draws.numpy(), "uniform").pvalue > 1e-4


def test_gumbel_noise_has_the_gumbel_law() -> None:
    draws = gumbel_all(torch.arange(5), torch.arange(5), 10_000).flatten()
    assert scipy.stats.kstest(draws.numpy(), "gumbel_r").pvalue > 1e-4


def test_range_is_what_the_spread_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 0, 0, 0], [0xFFFFFFFF] * 4])
    monkeypatch.setattr(noise, "philox4x32", lambda even, odd, key: extremes)
    low, high = gumbel(torch.tensor([0, 0]), torch.tensor([0, 0]), torch.tensor([0, 1])).tolist()
    assert low == pytest.approx(-3.0991, abs=1e-3)
    assert high == pytest.approx(32 * math.log(2), abs=1e-3)
    assert high - low < NOISE_SPREAD
    lowest, highest = uniforms(torch.tensor([0, 0]), torch.tensor([0, 0]), Purpose.ACCEPT).tolist()
    assert 0 < lowest < highest < 1
