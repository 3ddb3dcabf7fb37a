"""What ops see of a batch: consecutive pages as a start, others as page ids, and which one-token rows attend together."""

import torch

from paceline.forward.inputs import RowInput, build_batch
from paceline.kernels.primitives.layout import PassLayout, max_group_keys, pass_layout
from tests.fakes.random_model import random_spec


def layout(*rows: tuple[int, int], max_keys: int = 1000) -> PassLayout:
    """Rows as (new tokens, keys after them), each on consecutive pages."""
    inputs: list[RowInput] = []
    first_page = 0
    for num_new, num_keys in rows:
        num_pages = -(-num_keys // 16)
        inputs.append(RowInput([1] * num_new, num_keys - num_new, list(range(first_page, first_page + num_pages)), 1))
        first_page += num_pages
    return pass_layout(build_batch(inputs, 16), 16, max_keys)


def test_consecutive_pages_are_a_start_and_others_a_list() -> None:
    batch = build_batch([RowInput([1], 20, [7, 8], 1), RowInput([1, 2], 20, [8, 7], 2), RowInput([1], 3, [9], 1)], 16)
    got = pass_layout(batch, 16, 1000)
    assert got.kv_starts == [7 * 16, -1, 9 * 16]
    assert got.kv_pages[1].tolist() == [8, 7]
    assert got.query_start == [0, 1, 3, 4]
    assert got.kv_lens == [21, 22, 4]


def test_logits_of_all_tokens_need_no_index() -> None:
    assert layout((1, 5), (1, 9)).all_logits
    assert not layout((2, 5), (1, 9)).all_logits


def test_three_short_decode_rows_attend_together_and_two_do_not() -> None:
    assert layout((1, 30), (1, 20), (1, 25)).groups == [[0, 1, 2]]
    assert layout((1, 30), (1, 20), (1, 25)).lone_rows == []
    two = layout((1, 30), (6, 20), (1, 25))
    assert (two.groups, two.lone_rows) == ([], [0, 1, 2])


def test_prompt_chunks_and_drafts_stay_alone_beside_a_group() -> None:
    mixed = layout((1, 30), (6, 40), (1, 20), (1, 25), (30, 30))
    assert mixed.groups == [[0, 2, 3]]
    assert mixed.group_tokens[0].tolist() == [0, 7, 8]
    assert mixed.lone_rows == [1, 4]


def test_rows_of_like_length_share_a_group_of_bounded_size() -> None:
    rows = [(1, n) for n in (300, 20, 310, 25, 305, 30, 22)]
    got = layout(*rows, max_keys=1000)
    assert got.groups == [[2, 4, 0], [1, 3, 5, 6]]
    assert got.lone_rows == []
    assert all(mask.shape[0] * mask.shape[2] <= 1000 for mask in got.group_masks)
    assert layout(*rows, max_keys=100).groups == [[1, 3, 5]]


def test_the_mask_hides_what_pads_a_row() -> None:
    got = layout((1, 3), (1, 20), (1, 7))
    (mask,), (pages,), (tails,) = got.group_masks, got.group_pages, got.group_tails
    assert mask.shape == (3, 1, 32), "whole pages"
    assert [int((row == 0).sum()) for row in mask] == [3, 20, 7]
    assert torch.isinf(mask[0, 0, 3:]).all()
    assert pages.tolist() == [0, 0, 1, 2, 3, 3]
    assert tails.tolist() == torch.isinf(mask).flatten().nonzero().squeeze(1).tolist()


def test_a_group_has_the_keys_that_a_product_takes() -> None:
    inputs = [RowInput([0], n - 1, [row], 1) for row, n in enumerate((3, 2, 4))]
    (mask,) = pass_layout(build_batch(inputs, 4), 4, 1000).group_masks
    assert mask.shape == (3, 1, 16)


def test_the_bound_is_in_bytes_of_keys_and_values() -> None:
    assert max_group_keys(random_spec(9, 3, 64)) == (2 << 20) // (2 * 3 * 64 * 4)
