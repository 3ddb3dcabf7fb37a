"""The guarded policy on a fake clock: what is switched off and how soon, what comes back, and which rows are protected."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.stats import GuardState, SwitchOff
from paceline.scheduler import allotment, trials
from paceline.scheduler.cost import NUM_REFERENCE_STEPS
from paceline.scheduler.draft_length import DraftRow, FullDraftLength, GuardedDraftLength, NoDraftLength
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.trials import Trial, Trials
from tests.fakes.drafting_world import CPU_CURVE, FLAT_CURVE, Curve, Drafter, Independent, World, measured_costs, world_facts
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, make_config, make_facts, make_request

TINY_CURVE = ((1, 2.0), (8, 2.4), (64, 6.0))
"""A model so small that a drafter of 20 ms can never pay."""


def make_world(curve: Curve = CPU_CURVE, seed: int = 0, *, noise: float = 0.03, max_draft_length: int = 5) -> World:
    facts = world_facts(measured_costs(curve, lambda: 1.0), max_draft_length)
    return World(GuardedDraftLength(facts), curve, random.Random(seed), noise=noise, max_draft_length=max_draft_length)


def run(world: World, drafter: Drafter, num_steps: int, num_rows: int = 1) -> list[int]:
    """Drafts allowed in each step, all rows together."""
    first = world.num_steps
    for step in range(num_steps):
        world.step([f"r{i}" for i in range(num_rows)], [100 + step] * num_rows, drafter)
    return [sum(lengths) for lengths in world.allotted[first:]]


def last_drafting_step(allowed: Sequence[int]) -> int:
    """The step after which there are only trials, which are single drafts with at least four plain steps around each."""
    for end in range(len(allowed), 0, -1):
        if allowed[end - 1] > 1 or (allowed[end - 1] == 1 and sum(allowed[max(end - 5, 0) : end]) > 1):
            return end
    return 0


# Off within 20 steps


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("curve", [CPU_CURVE, FLAT_CURVE, TINY_CURVE])
def test_a_drafter_of_random_tokens_is_off_within_20_steps(curve: Curve, num_rows: int) -> None:
    for seed in range(3):
        world = make_world(curve, seed)
        allowed = run(world, Independent([0.001]), 200, num_rows)
        assert last_drafting_step(allowed) <= 20
        assert sum(allowed[20:]) <= 20
        assert world.lost_steps < 15


@pytest.mark.parametrize("acceptance", [0.0, 0.9, 1.0])
def test_a_drafter_slowed_by_20_ms_is_off_within_20_steps_however_good_it_is(acceptance: float) -> None:
    world = make_world(TINY_CURVE)
    allowed = run(world, Independent([acceptance], fixed_ms=20), 400)
    assert last_drafting_step(allowed) <= 20
    assert world.lost_steps < 40
    assert world.policy.report().num_switch_offs == {SwitchOff.DRAFTER_TIME: 1}


def test_a_slow_drafter_that_hardly_ever_drafts_is_off_too() -> None:
    world = make_world(TINY_CURVE)
    allowed = run(world, Independent([0.9], propensity=0.02, fixed_ms=20), 400)
    assert last_drafting_step(allowed) <= 20
    assert world.lost_steps < 45


def test_constant_tokens_cost_little_and_are_counted() -> None:
    class Constant(Drafter):
        """The same token again and again: right once in a while."""

        def draft(self, row: int, num_allotted: int, rng: random.Random) -> tuple[int, int]:
            return num_allotted, min(num_allotted, rng.random() < 0.03)

    world = make_world()
    run(world, Constant(), 1500)
    assert world.plain_ms / world.spent_ms > 0.985
    assert world.policy.report().num_switch_offs[SwitchOff.ACCEPTANCE] >= 1
    assert set(world.policy.report().states) == {"rows=1"}


# Off, at no cost


class Asked(GuardedDraftLength):
    """Counts how often it had to decide."""

    num_decisions = 0

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        self.num_decisions += 1
        return super().allot(rows, num_tokens_left)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_once_it_is_off_hardly_any_step_needs_a_decision(num_rows: int) -> None:
    policy = Asked(world_facts(measured_costs(TINY_CURVE, lambda: 1.0)))
    world = World(policy, TINY_CURVE, random.Random(0), noise=0.03)
    run(world, Independent([0.9], fixed_ms=20), 100, num_rows)
    before = policy.num_decisions
    run(world, Independent([0.9], fixed_ms=20), 400, num_rows)
    assert policy.num_decisions - before <= 400 // 8
    assert policy.report().states == {f"rows={'1' if num_rows == 1 else '5-8'}": GuardState.PLAIN}


def test_a_decision_not_to_draft_holds_for_its_rows_and_until_something_was_learned() -> None:
    world = make_world()
    run(world, Independent([0.0]), 200)
    names = ["r0"]
    while not world.policy.stays_plain(names):
        world.step(names, [400], Independent([0.0]))
    assert not world.policy.stays_plain(["r0", "r1"])
    assert not world.policy.stays_plain(["r1"])
    assert world.policy.stays_plain(names)
    world.policy.observe("r2", 1, 1, 1)
    assert not world.policy.stays_plain(names)


def test_through_the_scheduler_the_policy_is_asked_for_few_of_the_plain_steps() -> None:
    policy = Asked(make_facts())
    driver = Driver(make_facts(max_draft_length=5), make_config(), policy=policy, drafter=ToyDrafter(0.0, 1.0))
    driver.add(make_request("a", (1, 2), 300, ignore_eos=True))
    driver.run()
    driver.check_outputs()
    assert policy.num_decisions < 100


def test_rows_that_ask_for_no_drafts_cost_what_they_cost_without_a_drafter() -> None:
    """They are the plain arm of every proof."""
    policy = Asked(make_facts())
    driver = Driver(make_facts(max_draft_length=5), make_config(), policy=policy, drafter=ToyDrafter(0.9, 1.0))
    driver.add(replace(make_request("a", (1, 2), 100, ignore_eos=True), max_draft_length=0))
    driver.run()
    driver.check_outputs()
    assert policy.num_decisions == 1, "of the prompt"
    driver.add(make_request("b", (1, 2), 100, ignore_eos=True))
    driver.run()
    assert policy.num_decisions > 2


def test_a_trial_that_is_overdue_hides_no_other() -> None:
    trials = Trials()
    assert trials.next_step(["a", "b"], 0) is None
    assert not trials.is_due("a", 0)  # from step 4 on
    assert not trials.is_due("b", 98)  # from step 102 on
    assert trials.next_step(["a", "b"], 100) == 102
    assert trials.next_step(["a", "b"], 102) is None
    trials.begin("b", Trial("b", 1, 1.0), 102)  # nothing is tried before 103, nor b before 110
    assert trials.next_step(["a", "b"], 102) == 103
    assert trials.next_step(["b"], 102) == 110


def test_without_a_drafter_nobody_is_asked() -> None:
    policy = NoDraftLength()
    assert policy.stays_plain(["a"])
    scheduler = Scheduler(make_config(), replace(make_facts(), drafter="none"))
    assert isinstance(scheduler._policy, NoDraftLength)


# On, at the right length


def test_a_good_drafter_gets_all_it_can_use_after_the_first_plain_steps() -> None:
    world = make_world()
    allowed = run(world, Independent([0.97]), 300)
    assert allowed[:NUM_REFERENCE_STEPS] == [0] * NUM_REFERENCE_STEPS
    assert sum(length == 5 for length in allowed) > 250
    assert world.policy.report().states == {"rows=1": GuardState.DRAFTING}
    assert world.policy.report().lengths["rows=1"] > 4


def test_the_length_follows_the_cost_of_steps() -> None:
    """Equal acceptance: where the fourth token of a step is dear, two drafts are best; where tokens are free, all are."""
    at_cpu, at_flat = make_world(CPU_CURVE), make_world(FLAT_CURVE)
    cpu, flat = run(at_cpu, Independent([0.5]), 600), run(at_flat, Independent([0.5], drafter_ms=0.01), 600)
    assert sum(cpu[100:]) / 500 < 2.2
    assert sum(flat[100:]) / 500 > 3.5
    assert at_cpu.plain_ms / at_cpu.spent_ms > 1.3


def test_a_batch_that_fills_the_processor_decodes_plainly() -> None:
    """Sixteen rows on a CPU whose time is proportional to tokens by then: even good drafts do not pay."""
    world = make_world()
    allowed = run(world, Independent([0.6]), 150, num_rows=16)
    assert sum(allowed[20:]) < 40
    assert world.lost_steps < 10


def test_drafts_behind_a_position_where_nothing_stands_are_cut_and_the_others_stay() -> None:
    world = make_world()
    allowed = run(world, Independent([0.9], collapse=1), 600)
    assert sum(length == 1 for length in allowed[50:]) > 500
    assert world.plain_ms / world.spent_ms > 1.5
    assert world.policy.report().num_switch_offs[SwitchOff.POSITION] == 1


# Coming back


@pytest.mark.parametrize("bad", [Independent([0.0]), Independent([0.9], fixed_ms=80.0), Independent([0.9], propensity=0.0)])
def test_a_running_request_drafts_again_when_the_drafter_has_become_good(bad: Drafter) -> None:
    world = make_world()
    run(world, bad, 400)
    allowed = run(world, Independent([0.95]), 1000)
    assert sum(allowed[800:]) > 4.5 * 200


def test_longer_drafts_come_back_when_a_position_has_become_good() -> None:
    world = make_world()
    run(world, Independent([0.95], collapse=1), 400)
    assert sum(run(world, Independent([0.95]), 800)[600:]) > 4.5 * 200


def test_a_slow_neighbour_fools_it_for_a_few_steps_only() -> None:
    world = make_world(noise=0.05)
    run(world, Independent([0.9]), 200)
    for world.speed in (2.5, 1.0, 3.0, 1.0):
        allowed = run(world, Independent([0.9]), 200)
        assert sum(length == 0 for length in allowed) < 20
    assert world.lost_steps < 10


# Every row


def protected_speeds(curve: Curve) -> tuple[float, float, float]:
    """Of a prose row, a K=0 row and the seven copying ones: tokens per plain step's time."""
    world = make_world(curve)
    names = [f"copy{i}" for i in range(7)] + ["prose", "zero"]
    drafter = Independent([*[0.95] * 7, 0.2], drafter_ms=0.01)
    for step in range(300):
        world.step(names, [200 + step] * 9, drafter, limits=[*[5] * 8, 0])
    plain_steps = world.spent_ms / world.plain_step_ms(9, 0)
    return tuple(world.row_tokens[name] / plain_steps for name in ("prose", "zero", "copy0"))


def test_a_prose_row_and_a_row_without_drafts_do_not_pay_for_those_that_copy() -> None:
    prose, zero, _ = protected_speeds(CPU_CURVE)
    assert min(prose, zero) >= 0.97
    prose, zero, copy = protected_speeds(((1, 10.0), (64, 10.1), (256, 12.0)))
    assert min(prose, zero) >= 0.97
    assert copy > 2, "where drafts are nearly free, the others have them"


def test_planted_without_the_condition_on_rows_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allotment, "MIN_ROW_SPEED", 0.0)
    prose, zero, _ = protected_speeds(CPU_CURVE)
    assert max(prose, zero) < 0.9


def test_rows_held_back_by_one_draft_as_soon_as_it_is_gone() -> None:
    world = make_world(((1, 20.0), (9, 21.0), (64, 30.0)))
    names = [f"copy{i}" for i in range(7)]
    drafter = Independent([0.95] * 8)
    for _ in range(50):
        world.step([*names, "zero"], [100] * 8, drafter, limits=[*[5] * 7, 0])
    assert world.policy.report().states["rows=5-8"] is GuardState.PLAIN
    first = world.num_steps
    for _ in range(50):
        world.step(names, [100] * 7, drafter)
    assert sum(map(sum, world.allotted[first:])) > 30 * 7 * 4


# The drafter's KV


def test_prompts_are_caught_up_while_drafting_pays_and_not_when_it_is_off() -> None:
    world = make_world()
    prompt = [DraftRow("p", 5, 64, 64, num_prompt_tokens=64), DraftRow("r0", 5, 100, 1)]
    assert world.policy.allot(prompt, 512) == [1, 0]
    run(world, Independent([0.0]), 60)
    assert world.policy.allot(prompt, 512) == [0, 0]


def test_a_request_that_ends_soon_is_not_caught_up() -> None:
    policy = GuardedDraftLength(make_facts(max_draft_length=5, keeps_kv=True))
    world = World(policy, CPU_CURVE, random.Random(0))
    run(world, Independent([0.95], drafter_ms=3.0), 40)
    late = DraftRow("r0", 5, 400, 300, num_tokens_to_go=500)
    assert policy.allot([late], 512)[0] > 1
    assert policy.allot([DraftRow("r0", 2, 400, 300, num_tokens_to_go=3)], 512)[0] <= 1


# Through the scheduler


def test_a_useless_drafter_costs_few_drafts_and_a_request_is_forgotten() -> None:
    policy = GuardedDraftLength(make_facts())
    driver = Driver(make_facts(max_draft_length=5), make_config(), policy=policy, drafter=ToyDrafter(0.0, 1.0))
    driver.add(make_request("a", (1, 2), 120, ignore_eos=True))
    driver.run()
    driver.check_outputs()
    stats = driver.final("a").stats
    assert stats is not None
    assert stats.draft.num_draft_tokens <= 30
    assert stats.draft.num_plain_steps >= 100
    assert policy._acceptance._requests == {}
    assert set(policy._trials._retries) <= {""}
    assert driver.scheduler.stats().num_switch_offs_by_reason == {"drafter_time": 1}, "a millisecond of four"


def test_without_a_guard_every_row_has_its_limit() -> None:
    policy = FullDraftLength()
    assert policy.allot([DraftRow("a", 5, 9, 0), DraftRow("b", 0, 9, 0)], 1) == [5, 0]
    assert policy.report().states == {}


def test_trials_of_many_rows_share_one_budget() -> None:
    tried = trials.Trials()
    for i in range(100):
        tried.is_due(f"r{i}", 0)
    num_tried = 0
    for step in range(4, 400):
        for i in range(100):
            if tried.is_due(f"r{i}", step) and tried.can_lose(1.0, 10.0 * step, 10.0):
                tried.begin(f"r{i}", trials.Trial(f"r{i}", 1, 1.0), step)
                tried.end(f"r{i}", 1, 0)
                num_tried += 1
                break
    assert 10 <= num_tried <= trials.SHARE * 4000 + 50
