"""Which prompts run when in which arm: a plan as the list of its runs, in their order. Pure; `measure.py` carries it out.

One arm is in flight at a time. Blocks of prompts run in both arms, in the order AB BA AB BA ..., so that a slow drift of the machine falls
on both alike. A K = 0 request inside a batch that drafts would share the drafts' cost and hide it, which is why arms are never mixed.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.plan import MIN_BLOCKS, Plan
from paceline.prove.record import Arm, Phase

PILOT_TOKENS = 64
PILOT_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the load: a closed loop of so many conversations, or (concurrency 0) an open one of this rate."""

    concurrency: int
    rate_per_s: float = 0.0

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate_per_s:g} arrivals/s"


@dataclass(frozen=True, slots=True)
class Run:
    """One block of prompts in one arm, between two drains."""

    place: int  # in the order of time, from 0
    point: Point
    arm: Arm
    phase: Phase
    block: int
    num_blocks: int
    prompts: tuple[Prompt, ...]
    max_tokens: int
    pilot_length: int | None = None  # the draft length that this run tries out
    is_replayed: bool = False  # histories and lengths are those of a recording

    @property
    def num_requests(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)

    def __str__(self) -> str:
        if self.pilot_length is not None:
            return f"{self.point}, trying draft length {self.pilot_length}"
        if self.phase is Phase.RECORD:
            return f"{'reading' if self.is_replayed else 'recording'} all conversations, {self.arm}"
        if self.phase is Phase.WARM_UP:
            return f"{self.point}, warm-up, {self.arm}"
        return f"{self.point}, block {self.block + 1} of {self.num_blocks}, {self.arm}"


def points_of(plan: Plan) -> tuple[Point, ...]:
    """Each once, in the order given."""
    points = [*map(Point, plan.concurrencies), *(Point(0, rate_per_s) for rate_per_s in plan.rates_per_s)]
    return tuple(dict.fromkeys(points))


def schedule(plan: Plan) -> tuple[Run, ...]:
    """All runs of a plan. Raises BadInputError for a concurrency that the data set cannot fill."""
    prompts = mixed(plan.dataset.prompts, plan.seed)
    runs: list[Run] = []
    for index, point in enumerate(points_of(plan)):
        if point.concurrency > len(prompts):
            raise BadInputError(
                f"concurrency {point.concurrency} needs as many different prompts, {plan.dataset.label!r} has {len(prompts)}; "
                "take more prompts or a lower concurrency"
            )
        runs += _warm_ups(plan, point, prompts)
        first = random.Random(f"{plan.seed} {index}").randrange(2)  # noqa: S311 - no secret
        num_blocks = num_blocks_of(len(prompts), plan.num_blocks, point.concurrency)
        for block, of_block in enumerate(blocks(prompts, num_blocks, point.concurrency)):
            arms = plan.arms if (block + first) % 2 == 0 else plan.arms[::-1]
            for arm in arms:
                runs.append(Run(0, point, arm, Phase.MEASURE, block, num_blocks, of_block, plan.max_tokens))
    return tuple(replace(run, place=place) for place, run in enumerate(runs))


def mixed(prompts: Sequence[Prompt], seed: int) -> tuple[Prompt, ...]:
    """One of each category in turn, in an order that changes from round to round: every block holds a like mix, no order twice."""
    rng = random.Random(f"{seed} order")  # noqa: S311 - no secret
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    order: list[Prompt] = []
    for place in range(max(map(len, by_category.values()), default=0)):
        of_round = [of_category[place] for of_category in by_category.values() if place < len(of_category)]
        rng.shuffle(of_round)
        order += of_round
    return tuple(order)


def num_blocks_of(num_prompts: int, num_blocks: int, concurrency: int) -> int:
    """How many blocks: fewer than asked for where that many would share prompts, as long as enough are left for an interval.

    Else as many as asked for; prompts then stand in several blocks, which the judgement says.
    """
    num_apart = num_prompts // max(concurrency, 1)
    return num_apart if MIN_BLOCKS <= num_apart < num_blocks else num_blocks


def blocks(prompts: Sequence[Prompt], num_blocks: int, concurrency: int) -> Iterator[tuple[Prompt, ...]]:
    """The prompts cut into blocks of like size; each has enough for full concurrency, so that a short data set occurs more than once."""
    number = len(prompts)
    for index in range(num_blocks):
        start, end = index * number // num_blocks, (index + 1) * number // num_blocks
        size = max(end - start, concurrency, 1)
        yield tuple(prompts[(start + offset) % number] for offset in range(size))


def _warm_ups(plan: Plan, point: Point, prompts: Sequence[Prompt]) -> Iterator[Run]:
    """Each arm once at this point, with first turns only; with several draft lengths each of them, there and back."""
    few = tuple(replace(prompt, turns=prompt.turns[:1]) for prompt in prompts[: max(point.concurrency, 1)])
    run = Run(0, point, Arm.BASELINE, Phase.WARM_UP, 0, 1, few, min(plan.warm_up_tokens, plan.max_tokens))
    yield from (replace(run, arm=arm) for arm in plan.arms)
    if len(plan.draft_lengths) < 2 or Arm.SPECULATIVE not in plan.arms:
        return
    some = tuple(replace(prompt, turns=prompt.turns[:1]) for prompt in prompts[: max(point.concurrency, PILOT_PROMPTS)])
    pilot = replace(run, arm=Arm.SPECULATIVE, prompts=some, max_tokens=min(PILOT_TOKENS, plan.max_tokens))
    for length in (*plan.draft_lengths, *reversed(plan.draft_lengths)):
        yield replace(pilot, pilot_length=length)
