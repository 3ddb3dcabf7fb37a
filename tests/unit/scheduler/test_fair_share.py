from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.fair_share import fair_shares


def one_by_one(wishes: list[int], num_tokens: int, first: int) -> list[int]:
    """The definition: one token at a time, round after round."""
    shares = [0] * len(wishes)
    while num_tokens and shares != wishes:
        for index in (*range(first, len(wishes)), *range(first)):
            if num_tokens and shares[index] < wishes[index]:
                shares[index] += 1
                num_tokens -= 1
    return shares


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 150), st.integers(0, 11))
def test_equals_handing_out_one_by_one(wishes: list[int], num_tokens: int, first: int) -> None:
    first %= len(wishes)
    assert fair_shares(list(wishes), num_tokens, first) == one_by_one(wishes, num_tokens, first)


def test_a_large_wish_does_not_starve_small_ones() -> None:
    assert fair_shares([500, 3, 3], 50, 0) == [44, 3, 3]
