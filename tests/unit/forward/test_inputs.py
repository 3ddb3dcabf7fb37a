"""Rows of tokens to a batch: positions, slots through the page list, wanted logits, and host copies."""

import pytest
import torch

from paceline.forward.inputs import RowInput, build_batch


def test_rows_follow_each_other_with_their_own_positions_and_slots() -> None:
    batch = build_batch([RowInput([10], 5, [7, 9], 1), RowInput([20, 21, 22], 3, [2, 5, 1], 2), RowInput([30, 31], 0, [0], 0)], 4)
    assert batch.token_ids.tolist() == batch.token_ids_host == [10, 20, 21, 22, 30, 31]
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.write_slots.tolist() == [9 * 4 + 1, 2 * 4 + 3, 5 * 4, 5 * 4 + 1, 0, 1]
    assert batch.logit_rows.tolist() == [0, 2, 3]
    assert batch.query_start_host == (0, 1, 4, 6)
    assert batch.kv_lens_host == (6, 6, 2)
    assert batch.page_ids_host == ((7, 9), (2, 5), (0,))
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.write_slots, batch.logit_rows)} == {torch.int64}


def test_no_wanted_logits_is_an_empty_index() -> None:
    batch = build_batch([RowInput([1, 2], 0, [0], 0)], 4)
    assert batch.logit_rows.shape == (0,)
    assert batch.logit_rows.dtype is torch.int64


def test_too_few_pages_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="a row of 9 tokens has 2 pages of 4"):
        build_batch([RowInput([1], 8, [0, 1], 1)], 4)
