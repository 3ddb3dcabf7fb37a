"""Never slower, as a bound: whatever the drafter and the traffic do, time stays below 1.01 times plain decoding's and 50 plain steps."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from paceline.scheduler import cost, draft_length, guard
from paceline.scheduler.draft_length import DraftRow
from paceline.scheduler.observation import StepObservation
from tests.fakes.adversaries import TrustBreaker, random_adversary
from tests.fakes.drafting_world import CPU_CURVE, FLAT_CURVE, Independent, World, curve_ms, measured_costs, world_facts

NUM_LIVES = 80
NUM_SCHEDULES = 125
"""Of one engine's life; 10,000 in all. Each draws a batch, its contexts, what the drafter does, noise and the load of the machine."""
STEEP_CURVE = ((1, 20.0), (2, 40.0), (8, 150.0), (64, 1200.0))
DEAR_CURVE = ((1, 20.0), (2, 300.0), (65, 400.0))
"""Where drafting has a price of its own, only long drafts pay, and a single step that fails costs 20 plain ones."""


def live(seed: int) -> World:
    """One engine's life. Its drafter breaks its trust again and again: in every fourth schedule on average it is another one."""
    rng = random.Random(seed)
    curve = rng.choice((CPU_CURVE, CPU_CURVE, FLAT_CURVE, STEEP_CURVE))
    sigma, keeps_kv = rng.choice((0.0, 0.2, 0.5)), seed % 2 == 1
    facts = world_facts(measured_costs(curve, lambda: rng.lognormvariate(0, sigma)), rng.choice((3, 5, 8)), keeps_kv)
    world = World(draft_length.GuardedDraftLength(facts), curve, rng, max_draft_length=facts.max_draft_length, keeps_kv=keeps_kv)
    world.context_ms, world.idle_ms = rng.choice((0.0, 0.002)), rng.choice((0.0, 0.02))
    names: list[str] = []
    drafter, context, limits = random_adversary(rng, 1), 50, [0]
    for number in range(NUM_SCHEDULES):
        if not names or rng.random() < 0.25:
            world.forget(names)
            names = [f"{number}-{i}" for i in range(rng.choice((1, 1, 1, 2, 3, 4, 8)))]
            limits = [0 if i and rng.random() < 0.1 else facts.max_draft_length for i in range(len(names))]
            world.speed = rng.choice((1.0, 1.0, 1.0, 1.0, 1.5, 2.5))
            context, drafter = rng.choice((50, 300, 900, 2000)), random_adversary(rng, len(names))
        drafter.catch_up_ms = rng.choice((0.2, 0.5, 2.0))
        world.noise, world.spikes = rng.choice((0.0, 0.03, 0.1)), rng.choice((0.0, 0.0, 0.02))
        has_prompts = rng.random() < 0.3
        for step in range(rng.randint(2, 10)):
            contexts = [context + step] * len(names)
            if has_prompts:
                world.prompt_step(names, contexts, drafter, f"p{number}-{step}", rng.choice((16, 64, 256)))
                world.forget([f"p{number}-{step}"])
            else:
                world.step(names, contexts, drafter, limits)
    return world


def worst_excess(seeds: Iterable[int]) -> float:
    """By how many plain steps the lives of these seeds pass the bound at most; below 0 if all keep it."""
    lives = (live(seed) for seed in seeds)
    return max(world.lost_steps - world.surprise_steps - guard.MAX_LOST_STEPS for world in lives)


@pytest.mark.parametrize("first", range(4))
def test_no_drafter_costs_more_than_the_bound(first: int) -> None:
    assert worst_excess(range(first, NUM_LIVES, 4)) <= 0


def test_planted_without_an_account_the_lives_pass_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Account, "can_lose", lambda *_: True)
    assert worst_excess(range(4)) > 0


def test_planted_with_the_limit_of_a_large_batch_small_ones_pass_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_eight_rows(self: cost.CostModel) -> float:
        return self._table.ms(8) * self._level

    monkeypatch.setattr(cost.CostModel, "least_plain_ms", of_eight_rows)
    assert worst_excess((9, 11, 24)) > 0


def long_drafts(seed: int) -> float:
    """What drafts of 64 tokens make a stretch lose: they are known to be good, and then are so by turns."""
    rng = random.Random(seed)
    facts = world_facts(measured_costs(DEAR_CURVE, lambda: 1.0, (1, 2, 16, 65)), max_draft_length=64)
    world = World(draft_length.GuardedDraftLength(facts), DEAR_CURVE, rng, max_draft_length=64)
    for _ in range(40):
        world.policy.observe("a", 64, 64, 64)
    drafter = TrustBreaker(30, rng.randint(1, 3), rng.randint(1, 4), 1)
    for step in range(150):
        world.step(["a"], [100 + step], drafter)
    return world.lost_steps


def test_steps_that_cost_a_large_part_of_the_limit_stay_within_it() -> None:
    assert max(long_drafts(seed) for seed in range(12)) <= guard.MAX_LOST_STEPS


def test_planted_without_a_look_ahead_the_limit_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_look_ahead(self: guard.Account, worst_ms: float, least_plain_ms: float, share: float = 1.0) -> bool:
        return self.balance_ms >= -share * self.limit_ms(least_plain_ms)

    monkeypatch.setattr(guard.Account, "can_lose", no_look_ahead)
    assert max(long_drafts(seed) for seed in range(12)) > guard.MAX_LOST_STEPS


def false_table() -> float:
    """What is lost by a table that says that tokens are nearly free where they are dear, until each range of batches shows the truth."""
    facts = world_facts(measured_costs(FLAT_CURVE, lambda: 1.0), max_draft_length=8)
    world = World(draft_length.GuardedDraftLength(facts), STEEP_CURVE, random.Random(0), max_draft_length=8)
    for num_rows in (8, 16, 4, 2):
        for context in (100, 2000, 5000):
            for step in range(30):
                world.step([f"{num_rows}-{context}-{i}" for i in range(num_rows)], [context + step] * num_rows, Independent([0.7]))
    return world.lost_steps


def test_a_table_that_is_wrong_by_far_stays_within_the_limit() -> None:
    assert false_table() <= guard.MAX_LOST_STEPS


def test_planted_without_an_account_the_limit_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Account, "can_lose", lambda *_: True)
    assert false_table() > guard.MAX_LOST_STEPS


def endless_prompts() -> float:
    """What a drafter with KV loses, in plain steps, where every step has a prompt chunk, so that nothing is ever drafted."""
    policy = draft_length.GuardedDraftLength(replace(world_facts(measured_costs(CPU_CURVE, lambda: 1.0)), drafter_page_bytes=1))
    plain_ms, lost_ms = curve_ms(CPU_CURVE, 2), 0.0
    for number in range(400):
        lengths = policy.allot([DraftRow("r", 5, 100, 2 + number), DraftRow(f"p{number}", 5, 64, 64, num_prompt_tokens=64)], 512)
        propose_ms = 150.0 if lengths[1] else 0.0
        lost_ms += propose_ms
        policy.observe_step(StepObservation(1, 100, 0, 2, 65, True, False, 300.0 + propose_ms, propose_ms, 0, 0, 64 * lengths[1]))
    return lost_ms / plain_ms


def test_prompts_without_end_are_run_by_the_drafter_only_within_the_limit() -> None:
    assert 0 < endless_prompts() <= guard.MAX_LOST_STEPS


def test_planted_without_an_account_prompts_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Account, "can_lose", lambda *_: True)
    assert endless_prompts() > 10 * guard.MAX_LOST_STEPS


def test_the_drafters_time_counts_in_steps_in_which_it_is_allowed_nothing() -> None:
    policy = draft_length.GuardedDraftLength(world_facts(measured_costs(CPU_CURVE, lambda: 1.0)))
    policy.observe_step(StepObservation(1, 100, 0, 1, 1, False, False, 30.0, 5.0))
    policy.observe_step(StepObservation(1, 100, 0, 1, 65, True, False, 300.0, 6.0))
    assert policy._account.balance_ms == -11.0


def test_the_account_never_hoards() -> None:
    account = guard.Account()
    account.credit(1e6)
    assert account.balance_ms == 0
    assert account.can_lose(50 * 20.0, 20.0)
    assert not account.can_lose(50 * 20.0 + 1, 20.0)
    account.spend(202_000.0)
    assert account.can_lose(2000.0, 20.0), "1 % of what plain decoding would have taken is more by now"
