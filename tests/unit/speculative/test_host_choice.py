"""The choice without tensors is `choose`'s, row by row, or none at all."""

import math

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.verification import HostRows
from paceline.native import library
from paceline.speculative.host_choice import choose_on_host
from paceline.speculative.rows import sampling_rows, select_rows
from paceline.speculative.verify import choose

pytestmark = pytest.mark.skipif(isinstance(library.load(), str), reason="the native library is not built")

GREEDY = SamplingParams(1, temperature=0)
OPEN = SamplingParams(1, temperature=0.7, seed=2**64 - 5)
WIDTHS = [3, 0, 1, 2]


def _logits(vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(sum(WIDTHS), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _rows(*sampling: SamplingParams) -> HostRows:
    return HostRows([*sampling], [4, 0, 9, 2**31], [True, False, True, True])


def _by_tensors(logits: torch.Tensor, rows: HostRows) -> list[int]:
    row = torch.tensor([b for b, width in enumerate(WIDTHS) for _ in range(width)])
    position = torch.tensor([j for width in WIDTHS for j in range(width)])
    return [int(token) for token in choose(logits, select_rows(sampling_rows(rows), row, position))]


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 5000])
def test_greedy_and_open_rows_are_chosen_as_by_tensors(vocab_size: int) -> None:
    for seed in range(5):
        for rows in (_rows(GREEDY, OPEN, OPEN, GREEDY), _rows(GREEDY, GREEDY, GREEDY, GREEDY), _rows(OPEN, GREEDY, GREEDY, OPEN)):
            logits = _logits(vocab_size, seed)
            assert choose_on_host(logits, rows, WIDTHS) == _by_tensors(logits, rows)


def test_each_position_has_noise_of_its_own() -> None:
    """All logits are equal, so the noise alone decides."""
    rows = _rows(OPEN, OPEN, OPEN, OPEN)
    chosen = choose_on_host(torch.zeros(sum(WIDTHS), 900), rows, WIDTHS)
    assert chosen is not None
    assert len(set(chosen)) == len(chosen)


def test_the_lowest_of_equal_ids_wins() -> None:
    logits = torch.zeros(sum(WIDTHS), 100)
    logits[:, [37, 61, 99]] = 2.5
    assert choose_on_host(logits, _rows(GREEDY, GREEDY, GREEDY, GREEDY), WIDTHS) == [37] * sum(WIDTHS)
    assert choose_on_host(logits * 0 - 0.0, _rows(GREEDY, GREEDY, GREEDY, GREEDY), WIDTHS) == [0] * sum(WIDTHS)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_with_cuts_are_left_to_the_tensors(cut: dict[str, float]) -> None:
    cut_row = SamplingParams(1, temperature=0.7, seed=1, **cut)  # type: ignore[arg-type]
    assert choose_on_host(_logits(50, 0), _rows(GREEDY, GREEDY, cut_row, GREEDY), WIDTHS) is None
    greedy = SamplingParams(1, temperature=0, **cut)  # type: ignore[arg-type]
    assert choose_on_host(_logits(50, 0), _rows(greedy, greedy, greedy, greedy), WIDTHS) is not None, "nothing is drawn"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, OPEN])
def test_logits_that_are_not_finite_are_left_to_the_tensors(sampling: SamplingParams, value: float) -> None:
    logits = _logits(50, 0)
    logits[5, 49] = value
    assert choose_on_host(logits, _rows(sampling, sampling, sampling, sampling), WIDTHS) is None


def test_logits_in_pieces_are_left_to_the_tensors() -> None:
    assert choose_on_host(_logits(50, 0)[:, ::2], _rows(GREEDY, GREEDY, GREEDY, GREEDY), WIDTHS) is None


def test_what_c_would_read_otherwise_is_not_given_to_it() -> None:
    rows = _rows(GREEDY, GREEDY, GREEDY, GREEDY)
    assert choose_on_host(_logits(17, 0), rows, WIDTHS) is not None
    assert choose_on_host(_logits(17, 0).double(), rows, WIDTHS) is None
    assert choose_on_host(_logits(17, 0).half(), rows, WIDTHS) is None
    with pytest.raises(ValueError, match="6 rows of logits are to be judged, 5 are there"):
        choose_on_host(_logits(17, 0)[:5], rows, WIDTHS)
