"""The order of runs: both arms over the same blocks, ABBA, every point warmed, full concurrency."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadInputError
from paceline.prove.plan import Plan
from paceline.prove.record import Arm, Phase
from paceline.prove.schedule import Point, Run, blocks, mixed, points_of, schedule
from tests.fakes.prove_prompts import make_dataset

URL = "http://127.0.0.1:1"


def measured(runs: tuple[Run, ...], point: Point) -> list[Run]:
    return [run for run in runs if run.point == point and run.phase is Phase.MEASURE]


@pytest.mark.parametrize("seed", range(6))
def test_arms_alternate_over_the_same_blocks(seed: int) -> None:
    runs = schedule(Plan(URL, make_dataset(40), concurrencies=(1, 4), rates_per_s=(2.0,), seed=seed))
    assert [run.place for run in runs] == list(range(len(runs)))
    for point in (Point(1), Point(4), Point(0, 2.0)):
        of_point = measured(runs, point)
        pairs = list(zip(of_point[::2], of_point[1::2], strict=True))
        assert len(pairs) == 8
        for block, (first, second) in enumerate(pairs):
            assert first.block == second.block == block
            assert {first.arm, second.arm} == set(Arm)
            assert first.prompts == second.prompts
        firsts = [first.arm for first, _ in pairs]
        assert firsts[::2] == [firsts[0]] * 4
        assert firsts[1::2] == [pairs[0][1].arm] * 4, "ABBA: a drift falls on both arms alike"


def test_which_arm_begins_is_drawn() -> None:
    begins = {measured(schedule(Plan(URL, make_dataset(), concurrencies=(1,), seed=seed)), Point(1))[0].arm for seed in range(10)}
    assert begins == set(Arm)


def test_each_point_is_warmed_in_each_arm_before_it_is_measured() -> None:
    runs = schedule(Plan(URL, make_dataset(20), concurrencies=(1, 8), rates_per_s=(3.0,), max_tokens=100, warm_up_tokens=16))
    for point in (Point(1), Point(8), Point(0, 3.0)):
        of_point = [run for run in runs if run.point == point]
        warm, rest = of_point[:2], of_point[2:]
        assert {run.arm for run in warm} == set(Arm)
        assert {run.phase for run in warm} == {Phase.WARM_UP}
        assert {run.phase for run in rest} == {Phase.MEASURE}
        assert all(len(run.prompts) >= point.concurrency and run.max_tokens == 16 for run in warm)
        assert all(run.max_tokens == 100 for run in rest)


def test_several_draft_lengths_are_tried_there_and_back_before_the_first_block() -> None:
    runs = schedule(Plan(URL, make_dataset(), concurrencies=(1,), draft_lengths=(2, 5)))
    assert [run.pilot_length for run in runs if run.pilot_length is not None] == [2, 5, 5, 2]
    assert {run.phase for run in runs if run.pilot_length is not None} == {Phase.WARM_UP}
    assert not any(run.pilot_length for run in schedule(Plan(URL, make_dataset(), concurrencies=(1,), draft_lengths=(2,))))


@settings(deadline=None)
@given(number=st.integers(1, 60), num_blocks=st.integers(1, 12), concurrency=st.integers(0, 60))
def test_blocks_hold_everything_and_fill_the_slots(number: int, num_blocks: int, concurrency: int) -> None:
    concurrency = min(concurrency, number)
    prompts = make_dataset(number).prompts
    cut = list(blocks(prompts, num_blocks, concurrency))
    assert len(cut) == num_blocks
    assert {prompt for block in cut for prompt in block} == set(prompts)
    for block in cut:
        assert len(block) >= max(concurrency, 1)
        assert len(set(block)) == len(block), "no prompt twice in a block"
    if number // num_blocks >= max(concurrency, 1):
        assert sum(map(len, cut)) == number, "each once, where there are enough"
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize(
    ("num_prompts", "num_blocks", "concurrency", "expected", "is_apart"),
    [
        (80, 16, 8, 10, True),
        (64, 16, 8, 8, True),
        (63, 16, 8, 16, False),
        (128, 16, 8, 16, True),
        (20, 8, 4, 8, False),
        (9, 4, 4, 4, False),
    ],
)
def test_fewer_blocks_rather_than_prompts_in_several(
    num_prompts: int, num_blocks: int, concurrency: int, expected: int, is_apart: bool
) -> None:
    """As long as there are enough of them for an interval."""
    runs = schedule(Plan(URL, make_dataset(num_prompts), concurrencies=(concurrency,), num_blocks=num_blocks))
    base = [run for run in measured(runs, Point(concurrency)) if run.arm is Arm.BASELINE]
    assert len(base) == expected
    assert {run.num_blocks for run in base} == {expected}
    asked = Counter(prompt.question_id for run in base for prompt in run.prompts)
    assert len(asked) == num_prompts
    assert (max(asked.values()) == 1) is is_apart


def test_blocks_are_a_mix_of_the_categories() -> None:
    prompts = make_dataset(88).prompts
    order = mixed(prompts, seed=3)
    assert sorted(order, key=lambda prompt: prompt.question_id) == list(prompts)
    for start in range(0, 88, 11):
        assert len({prompt.category for prompt in order[start : start + 11]}) == 11
    rounds = {tuple(prompt.category for prompt in order[start : start + 11]) for start in range(0, 88, 11)}
    assert len(rounds) > 4, "or half of the categories would always run with the same arm first"
    assert order == mixed(prompts, seed=3) != mixed(prompts, seed=4)


def test_points_are_measured_once() -> None:
    plan = Plan(URL, make_dataset(), concurrencies=(4, 1, 4), rates_per_s=(1.5, 1.5))
    assert points_of(plan) == (Point(4), Point(1), Point(0, 1.5))
    assert [str(point) for point in points_of(plan)] == ["concurrency 4", "concurrency 1", "1.5 arrivals/s"]


def test_one_arm_alone() -> None:
    runs = schedule(Plan(URL, make_dataset(), concurrencies=(1,), arms=(Arm.SPECULATIVE,)))
    assert Counter(run.arm for run in runs) == {Arm.SPECULATIVE: 9}


def test_a_concurrency_that_the_data_cannot_fill_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"concurrency 12 needs as many different prompts.* has 11"):
        schedule(Plan(URL, make_dataset(11), concurrencies=(12,)))


@pytest.mark.parametrize(
    "given",
    [
        {"concurrencies": (0,)}, {"concurrencies": (1025,)}, {"concurrencies": ()}, {"rates_per_s": (0.0,)}, {"num_blocks": 0},
        {"rates_per_s": (float("nan"),)}, {"num_blocks": 10**6}, {"max_tokens": 0}, {"max_tokens": 1 << 21}, {"temperature": -1.0},
        {"draft_lengths": (0,)}, {"timeout_s": 0.0}, {"arms": ()}, {"arms": (Arm.BASELINE, Arm.BASELINE)}, {"warm_up_tokens": 0},
    ],
)  # fmt: skip
def test_a_plan_checks_itself(given: dict[str, object]) -> None:
    with pytest.raises(BadInputError):
        Plan(URL, make_dataset(), **given)
    with pytest.raises(BadInputError, match="no prompts"):
        Plan(URL, make_dataset(0))
