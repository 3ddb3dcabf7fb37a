"""Logit processing against plain Python, ties by rule, and one result whatever the shape of the call."""

import itertools
import math

import pytest
import torch

from paceline.core.verification import SamplingRows
from paceline.speculative import process
from paceline.speculative.process import process_logits
from paceline.speculative.rows import select_rows
from tests.fakes.toy_law import Options, reference_law

GRID = [Options(*values) for values in itertools.product((0.3, 1.0, 1.7), (0, 1, 3, 40), (1.0, 0.9, 0.4, 0.01), (0.0, 0.05, 1.0))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows_of(options: list[Options]) -> SamplingRows:
    num_rows = len(options)
    return SamplingRows(
        temperature=torch.tensor([o.temperature for o in options]),
        top_k=torch.tensor([o.top_k for o in options]),
        top_p=torch.tensor([o.top_p for o in options]),
        min_p=torch.tensor([o.min_p for o in options]),
        seed=torch.arange(num_rows),
        output_index=torch.arange(num_rows),
        emits=torch.ones(num_rows, dtype=torch.bool),
        any_sampled=any(o.temperature > 0 for o in options),
    )


def process_one(logits: list[float], options: Options) -> list[float]:
    return process_logits(torch.tensor([logits]), rows_of([options]))[0].tolist()


def kept(logits: list[float], options: Options) -> list[int]:
    return [i for i, x in enumerate(process_one(logits, options)) if x > -math.inf]


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 40, 41, 200])
def test_law_equals_plain_python(vocab_size: int) -> None:
    logits = torch.randn((len(GRID), vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * 3
    processed = process_logits(logits, rows_of(GRID))
    law = processed.softmax(1)
    for i, options in enumerate(GRID):
        assert law[i].tolist() == pytest.approx(reference_law(logits[i].tolist(), options), abs=1e-12), options


def test_law_equals_plain_python_when_many_logits_are_equal() -> None:
    logits = torch.randint(0, 4, (len(GRID), 40), generator=torch.Generator().manual_seed(1)).float()
    law = process_logits(logits, rows_of(GRID)).softmax(1)
    for i, options in enumerate(GRID):
        assert law[i].tolist() == pytest.approx(reference_law(logits[i].tolist(), options), abs=1e-12), options


def test_top_k_keeps_the_lowest_of_equal_logits() -> None:
    assert kept([1.0, 2.0, 1.0, 1.0], Options(top_k=2)) == [0, 1]
    assert kept([0.0, -0.0, 0.0], Options(top_k=1)) == [0]
    assert kept([-0.0, 0.0, 0.0], Options(top_k=1)) == [0]
    assert kept([-1.0, -2.0, -1.0], Options(top_k=1)) == [0]


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert kept([1.0, 2.0, 3.0], Options(top_k=3)) == [0, 1, 2]
    assert kept([1.0, 2.0, 3.0], Options(top_k=1000)) == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = [math.log(x) for x in (0.5, 0.25, 0.15, 0.1)]
    assert kept(logits, Options(top_p=0.49)) == [0]
    assert kept(logits, Options(top_p=0.51)) == [0, 1]
    assert kept(logits, Options(top_p=0.76)) == [0, 1, 2]
    assert kept([0.0, 0.0, 0.0, 0.0], Options(top_p=0.5)) == [0, 1]


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, Options(top_k=2, top_p=0.56)) == [0]  # 0.4 of 0.7 is 0.571
    assert kept(logits, Options(top_p=0.56)) == [0, 1]


def test_min_p_is_a_share_of_the_top_probability() -> None:
    logits = [math.log(x) for x in (0.5, 0.26, 0.24)]
    assert kept(logits, Options(min_p=0.5)) == [0, 1]
    assert kept([2.0, 2.0, 1.9], Options(min_p=1.0)) == [0, 1]


def test_temperature_divides() -> None:
    assert process_one([1.0, -3.0], Options(temperature=0.5)) == [2.0, -6.0]


def test_greedy_rows_and_masked_tokens_pass_through() -> None:
    options = [Options(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9), Options(top_p=0.9), Options(top_k=2), Options()]
    logits = torch.tensor([[0.5, -math.inf, 0.25]] * 4)
    processed = process_logits(logits, rows_of(options))
    assert torch.equal(processed[0], logits[0].double())
    assert processed[:, 1].tolist() == [-math.inf] * 4
    assert torch.equal(process_logits(logits[:1], rows_of(options[:1])), logits[:1].double())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_call(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    vocab_size = 5003
    logits = torch.randn((len(GRID), vocab_size), generator=torch.Generator().manual_seed(0)) * 2
    rows = rows_of(GRID)
    together = process_logits(logits, rows)
    order = torch.randperm(len(GRID), generator=torch.Generator().manual_seed(1))
    for part in (*order.split(5), *order[:20].split(1)):
        assert torch.equal(process_logits(logits[part], select_rows(rows, part)), together[part])


def test_the_width_of_the_search_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((len(GRID), 300), generator=torch.Generator().manual_seed(0))
    rows = rows_of(GRID)
    results: list[torch.Tensor] = []
    for widths in ((1, 2, 3, 50, 200), (2,), (300,), ()):
        monkeypatch.setattr(process, "_WIDTHS", widths)
        results.append(process_logits(logits, rows))
    assert all(torch.equal(result, results[0]) for result in results)
