"""Sampling parameters as tensors: bits of the seed, output index after preemption, selection with repeats."""

import torch

from paceline.core.plan import Span, SpanKind
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.speculative.rows import host_rows, sampling_rows, select_rows


def span(slot: int, *, emits: bool = True) -> Span:
    return Span(slot, SpanKind.DECODE, 0, 0, 1, 0, 0, emits)


def test_one_row_per_span_in_the_plans_order() -> None:
    slots = {
        3: Slot([1, 2, 3, 4], 1, SamplingParams(max_tokens=9, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=(1 << 64) - 1), [], 0),
        8: Slot([1, 2], 2, SamplingParams(max_tokens=9, temperature=0.0, seed=5), [], 0),
    }
    rows = sampling_rows(host_rows([span(8, emits=False), span(3)], slots))
    assert rows.temperature.tolist() == [0.0, 0.5]
    assert rows.top_k.tolist() == [0, 7]
    assert rows.top_p.tolist() == torch.tensor([1.0, 0.9]).tolist()
    assert rows.min_p.tolist() == torch.tensor([0.0, 0.1]).tolist()
    assert rows.seed.tolist() == [5, -1]
    assert rows.output_index.tolist() == [0, 3]
    assert rows.emits.tolist() == [False, True]
    assert rows.any_sampled
    assert not host_rows([span(8)], slots).any_sampled
    later = select_rows(rows, torch.tensor([1, 1, 0]), torch.tensor([0, 1, 2]))
    assert later.output_index.tolist() == [3, 4, 2]
    assert later.seed.tolist() == [-1, -1, 5]
