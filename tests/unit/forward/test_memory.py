"""Bytes of a page, and the memory that is allocated for pages."""

import pytest
import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.kv import KvPages
from paceline.errors import MissingError
from paceline.forward.memory import allocate_kv, page_bytes
from tests.fakes.random_model import random_forward, random_spec

SPEC = random_spec(num_heads=4, num_kv_heads=2, head_dim=16)
FORWARD = random_forward(SPEC)


class HalfForward:
    """A model whose runner keeps KV in half precision."""

    spec = SPEC
    choices = ()
    weight_bytes = 0
    kv_dtype = torch.float16

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        raise NotImplementedError


def test_page_bytes_is_what_a_page_takes() -> None:
    kv = allocate_kv(FORWARD, 10, 8)
    assert kv.kv.nbytes == 10 * page_bytes(FORWARD, 8)
    assert page_bytes(FORWARD, 8) == 2 * 2 * 2 * 16 * 8 * 4  # layers, k and v, heads, elements, tokens, bytes


def test_half_precision_takes_half_the_memory() -> None:
    kv = allocate_kv(HalfForward(), 10, 8)
    assert kv.kv.dtype is torch.float16
    assert kv.kv.nbytes == 10 * page_bytes(HalfForward(), 8) == 5 * page_bytes(FORWARD, 8)


def test_keys_and_values_are_views_of_one_tensor_of_zeros() -> None:
    kv = allocate_kv(FORWARD, 3, 16)
    assert kv.k.shape == kv.v.shape == (2, 2, 48, 16)
    assert not kv.kv.any()
    kv.k.fill_(1)
    assert kv.kv[:, 0].eq(1).all()
    assert not kv.v.any()
    assert kv.kv.dtype is torch.float32


def test_memory_that_cannot_be_had_is_refused_with_the_numbers() -> None:
    with pytest.raises(MissingError, match=r"1,000,000,000,000 pages \(16,384,000,000,000,000 bytes\).*--kv-cache-memory-bytes"):
        allocate_kv(FORWARD, 10**12, 32)
