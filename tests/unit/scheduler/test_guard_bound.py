"""Never slower, as a bound: whatever the drafter and the traffic do, time stays below 1.01 times plain decoding's and 50 plain steps."""

import random

import pytest

from paceline.scheduler import draft_length, guard
from tests.fakes.adversaries import random_adversary
from tests.fakes.drafting_world import CPU_CURVE, FLAT_CURVE, World, measured_costs, world_facts

NUM_LIVES = 100
NUM_SCHEDULES = 100
"""Of one engine's life: each a batch, its contexts, a drafter's behaviour, noise and the load of the machine."""
STEEP_CURVE = ((1, 20.0), (2, 40.0), (8, 150.0), (64, 1200.0))


def live(seed: int, num_schedules: int, mean_steps: int) -> float:
    """One engine's life; returns the most that any stretch of it lost beyond 1 %, in plain steps."""
    rng = random.Random(seed)
    curve = rng.choice((CPU_CURVE, CPU_CURVE, FLAT_CURVE, STEEP_CURVE))
    sigma = rng.choice((0.0, 0.2, 0.5))
    facts = world_facts(measured_costs(curve, lambda: rng.lognormvariate(0, sigma)), max_draft_length=rng.choice((3, 5, 8)))
    world = World(draft_length.GuardedDraftLength(facts), curve, rng, max_draft_length=facts.max_draft_length)
    for number in range(num_schedules):
        num_rows = rng.choice((1, 1, 1, 2, 3, 4, 8))
        names = [f"{number}-{i}" for i in range(num_rows)]
        context = rng.choice((50, 300, 900, 2000))
        world.noise, world.spikes = rng.choice((0.0, 0.03, 0.1)), rng.choice((0.0, 0.0, 0.02))
        world.context_ms = rng.choice((0.0, 0.002))
        world.speed = rng.choice((1.0, 1.0, 1.0, 1.0, 1.5, 2.5))
        drafter = random_adversary(rng, num_rows)
        for step in range(rng.randint(1, 2 * mean_steps)):
            world.step(names, [context + step] * num_rows, drafter)
        world.forget(names)
    return world.lost_steps


@pytest.mark.parametrize("first", range(0, NUM_LIVES, 25))
def test_no_drafter_costs_more_than_the_bound(first: int) -> None:
    for seed in range(first, first + 25):
        lost = live(seed, NUM_SCHEDULES, 12)
        assert lost <= guard.MAX_LOST_STEPS, f"life {seed} lost {lost:.1f} plain steps beyond 1 %"
