"""Exact numbers of requests per category, and an even mix in an order that never changes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadInputError
from paceline.prove.datasets import shipped, subset
from paceline.prove.datasets.prompt import CATEGORIES, Dataset, Prompt


def dataset(*turns: tuple[str, int]) -> Dataset:
    """A data set of conversations of (category, number of turns)."""
    prompts = [Prompt(f"{number:032}", name, tuple(f"{number}.{turn}" for turn in range(num))) for number, (name, num) in enumerate(turns)]
    return Dataset("test", "qualitative", tuple(prompts))


def requests(data: Dataset) -> Counter[str]:
    return Counter(prompt.category for prompt in data.prompts for _ in prompt.turns)


@pytest.mark.parametrize("num", [1, 2, 4, 7, 50])
def test_the_shipped_set_gives_exactly_that_many_requests(num: int) -> None:
    taken = subset.take(shipped.load("qualitative"), num)
    assert requests(taken) == dict.fromkeys(CATEGORIES, num)
    several = {prompt.category for prompt in taken.prompts if len(prompt.turns) > 1}
    assert several == (set(CATEGORIES) if num > 1 else set())
    assert taken.label.endswith(f"qualitative, {num} request{'s' * (num > 1)} per category")
    assert "not SPEED-Bench" in taken.label
    if num == 4:
        assert Counter(prompt.category for prompt in taken.prompts) == dict.fromkeys(CATEGORIES, 3), "2 + 1 + 1 turns"


def test_the_same_seed_takes_the_same_and_another_takes_others() -> None:
    whole = shipped.load("qualitative")
    assert subset.take(whole, 4).sha256 == subset.take(whole, 4).sha256
    assert subset.take(whole, 4).sha256 != subset.take(whole, 4, seed=1).sha256
    backwards = Dataset(whole.label, whole.split, whole.prompts[::-1])
    assert set(subset.take(backwards, 4).prompts) == set(subset.take(whole, 4).prompts), "the order of the file plays no part"


def texts(*lengths: tuple[int, ...], name: str = "a") -> list[Prompt]:
    return [Prompt(f"{name}{number:031}", name, tuple("x" * length for length in turns)) for number, turns in enumerate(lengths)]


def test_the_shortest_quarter_of_each_category_and_number_of_turns() -> None:
    of_a = texts((50,), (40,), (30,), (20,), (10,), (9, 9), (1, 60), (5, 5), (8, 8))
    of_b = texts((900,), (700,), (800,), (1000,), name="b")
    few = subset.shortest(Dataset("test", "qualitative", (*of_a, *of_b)), 1)
    assert [prompt.turns for prompt in few.prompts] == [("x" * 20,), ("x" * 10,), ("x" * 5, "x" * 5), ("x" * 700,)]
    assert few.label == "test, the shortest quarter of each category"
    backwards = subset.shortest(Dataset("test", "qualitative", (*of_b, *of_a)[::-1]), 1)
    assert set(backwards.prompts) == set(few.prompts), "the order of the file plays no part"


def test_a_system_message_counts_and_ties_go_by_id() -> None:
    short, long = texts((1,), (2,))
    assert subset.shortest(Dataset("t", "s", (replace(short, system="xxx"), long)), 1).prompts == (long,)
    same = texts((7,), (7,), (7,), (7,))
    assert subset.shortest(Dataset("t", "s", tuple(same[::-1])), 1).prompts == (same[0],)


def test_the_shortest_of_the_shipped_set_keep_every_category_and_conversations() -> None:
    whole = shipped.load("qualitative")
    taken, usual = (subset.take(data, 4) for data in (subset.shortest(whole, 4), subset.take(whole, 4)))
    assert requests(taken) == dict.fromkeys(CATEGORIES, 4)
    assert {prompt.category for prompt in taken.prompts if len(prompt.turns) > 1} == set(CATEGORIES)
    assert 2 * num_chars(taken) < num_chars(usual)
    assert taken.sha256 == "506430bcfc8a663aac4ba320f332aa4d62f2ff554435b50af07d97c3760e4a53", "other prompts make other figures"


def num_chars(data: Dataset) -> int:
    return sum(len(turn) for prompt in data.prompts for turn in prompt.turns)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_shortest_add_up_whenever_all_do(turns: list[int], num: int) -> None:
    data = dataset(*(("a", length) for length in turns))
    if num in sums(turns):
        assert requests(subset.take(subset.shortest(data, num), num)) == {"a": num}


def test_all_of_a_category_can_be_taken() -> None:
    whole = shipped.load("throughput_1k")
    assert set(subset.take(whole, 64).prompts) == set(whole.prompts)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_a_number_is_hit_exactly_or_refused(turns: list[list[int]], num: int) -> None:
    data = dataset(*((f"c{number}", length) for number, lengths in enumerate(turns) for length in lengths))
    reachable = all(num in sums(lengths) for lengths in turns)
    if not reachable:
        with pytest.raises(BadInputError):
            subset.take(data, num)
        return
    taken = subset.take(data, num)
    assert requests(taken) == {f"c{number}": num for number in range(len(turns))}
    assert len(set(taken.prompts)) == len(taken.prompts)


def sums(lengths: list[int]) -> set[int]:
    found = {0}
    for length in lengths:
        found |= {total + length for total in found}
    return found


def test_what_cannot_be_taken_says_why() -> None:
    pairs = dataset(("a", 2), ("a", 2), ("b", 2), ("b", 2))
    with pytest.raises(
        BadInputError, match="a has no conversations that add up to 3 requests: theirs have 2 turns; ask for a multiple of 2"
    ):
        subset.take(pairs, 3)
    with pytest.raises(BadInputError, match="a has 4 requests, asked for 5 per category; ask for at most 4"):
        subset.take(pairs, 5)
    with pytest.raises(BadInputError, match="between 1 and 10,000"):
        subset.take(pairs, 0)


def test_categories_are_chosen_by_name() -> None:
    whole = shipped.load("qualitative")
    few = subset.only(whole, ["math", "coding"])
    assert Counter(prompt.category for prompt in few.prompts) == {"coding": 80, "math": 80}
    assert few.label == f"{whole.label}, only math, coding"
    with pytest.raises(BadInputError, match=r"no category maths; .* has coding, humanities, math"):
        subset.only(whole, ["maths"])
    with pytest.raises(BadInputError, match="no category is named"):
        subset.only(whole, [])


def test_every_stretch_of_the_order_holds_the_mix() -> None:
    mixed = subset.interleave(shipped.load("qualitative"))
    assert set(mixed.prompts) == set(shipped.load("qualitative").prompts)
    for start in range(0, 880, 11):
        assert {prompt.category for prompt in mixed.prompts[start : start + 11]} == set(CATEGORIES)
    uneven = subset.interleave(dataset(*[("a", 1)] * 30, *[("b", 1)] * 10))
    for start in range(0, 40, 4):
        assert Counter(prompt.category for prompt in uneven.prompts[start : start + 4]) == {"a": 3, "b": 1}
