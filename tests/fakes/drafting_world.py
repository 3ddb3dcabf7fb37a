"""Steps on a fake clock, for the policy of draft lengths: what they take, what of the drafts stands, and what plain decoding would take.

A batch keeps its number of rows for a stretch, as under steady load; so the time that plain decoding needs for the same tokens is known.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.facts import EngineFacts, StepCosts, TargetCost
from paceline.scheduler.draft_length import DraftLengthPolicy, DraftRow
from paceline.scheduler.observation import StepObservation

CPU_CURVE = ((1, 24.5), (2, 27.0), (3, 30.0), (4, 43.0), (6, 44.0), (8, 52.0), (16, 97.0), (64, 314.0), (128, 620.0))
"""Milliseconds of the matrices of a small model by number of tokens, two cores."""
FLAT_CURVE = ((1, 10.0), (64, 10.4), (256, 20.0))
"""As on a device whose memory, not its arithmetic, takes the time: drafts cost next to nothing."""

Curve = Sequence[tuple[int, float]]


def curve_ms(curve: Curve, num_tokens: int) -> float:
    """Straight lines between the points, and beyond the last one."""
    tokens = [point[0] for point in curve]
    upper = min(max(bisect_left(tokens, num_tokens), 1), len(curve) - 1)
    (low, low_ms), (high, high_ms) = curve[upper - 1], curve[upper]
    return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)


class Drafter:
    """What a drafter is like, by step. `accepts` draws how many of a row's drafts stand."""

    def draft(self, row: int, num_allotted: int, rng: random.Random) -> tuple[int, int]:
        """(drafts, accepted ones) of a row that may have `num_allotted`."""
        raise NotImplementedError

    def propose_ms(self, longest: int) -> float:
        return 0.2 if longest else 0.0

    def end_step(self, num_allotted: int) -> None:
        """Told what the whole batch was allowed."""


@dataclass
class Independent(Drafter):
    """Accepts each draft with the row's own probability; drafts with a set probability, `drafter_ms` per position."""

    acceptance: Sequence[float]  # by row; the last one for all further rows
    propensity: float = 1.0
    drafter_ms: float = 0.2
    fixed_ms: float = 0.0
    collapse: int | None = None  # a position from which on nothing stands

    def draft(self, row: int, num_allotted: int, rng: random.Random) -> tuple[int, int]:
        if num_allotted == 0 or rng.random() >= self.propensity:
            return 0, 0
        probability = self.acceptance[min(row, len(self.acceptance) - 1)]
        accepted = 0
        while accepted < num_allotted and accepted != self.collapse and rng.random() < probability:
            accepted += 1
        return num_allotted, accepted

    def propose_ms(self, longest: int) -> float:
        return self.fixed_ms + self.drafter_ms * longest if longest else 0.0


@dataclass
class World:
    """One engine's steps: the truth about time, the clock, and the policy that lives through all of it."""

    policy: DraftLengthPolicy
    curve: Curve
    rng: random.Random
    noise: float = 0.0  # sigma of each step's own factor
    spikes: float = 0.0  # share of steps that take three times as long
    context_ms: float = 0.0  # per context token of all rows together
    max_draft_length: int = 5
    speed: float = 1.0  # of the whole machine: a slow neighbour raises it
    spent_ms: float = 0.0
    plain_ms: float = 0.0  # what plain decoding would have spent for the same tokens
    worst_plain_step_ms: float = 0.0
    lost_steps: float = (
        0.0  # the most that any stretch lost beyond 1 % of plain decoding's time, in plain steps of the largest batch so far
    )
    _loss_ms: float = 0.0  # of the stretch up to now that lost most
    num_steps: int = 0
    num_drafted: int = 0
    allotted: list[list[int]] = field(default_factory=list[list[int]])
    row_tokens: dict[str, int] = field(default_factory=dict[str, int])

    def plain_step_ms(self, num_rows: int, context: int) -> float:
        return self.speed * (curve_ms(self.curve, num_rows) + self.context_ms * context)

    def step(self, names: Sequence[str], contexts: Sequence[int], drafter: Drafter, limits: Sequence[int] | None = None) -> None:
        """One decode step of the rows `names`; `limits` are their most drafts."""
        rng, num_rows, context = self.rng, len(names), sum(contexts)
        rows = [
            DraftRow(name, self.max_draft_length if limits is None else limits[i], contexts[i], 0, num_tokens_to_go=1000)
            for i, name in enumerate(names)
        ]
        lengths = self.policy.allot(rows, 512)
        drafts = [drafter.draft(i, length, rng) for i, length in enumerate(lengths)]
        drafter.end_step(sum(lengths))
        num_drafted = sum(drafted for drafted, _ in drafts)
        emitted = sum(accepted for _, accepted in drafts) + num_rows
        own = rng.lognormvariate(0, self.noise) if self.noise else 1.0
        if self.spikes and rng.random() < self.spikes:
            own *= 3
        target_ms = self.speed * own * (curve_ms(self.curve, num_rows + num_drafted) + self.context_ms * context)
        propose_ms = self.speed * drafter.propose_ms(max(lengths)) if max(lengths) else 0.0
        for name, length, (drafted, accepted) in zip(names, lengths, drafts, strict=True):
            self.policy.observe(name, length, drafted, accepted)
            self.row_tokens[name] = self.row_tokens.get(name, 0) + accepted + 1
        self.policy.observe_step(
            StepObservation(
                num_rows=num_rows,
                num_context_tokens=context,
                num_drafted_tokens=num_drafted,
                num_emitted_tokens=emitted,
                num_target_tokens=num_rows + num_drafted,
                has_prefill=False,
                is_control=False,
                duration_ms=target_ms + propose_ms,
                propose_ms=propose_ms,
                num_allotted_tokens=sum(lengths),
                longest_draft=max(lengths),
            )
        )
        plain_step_ms = self.plain_step_ms(num_rows, context)
        # The step's own factor would have struck plain steps alike: a plain step with the same one, the others at its mean.
        mean = (1 + 2 * self.spikes) * math.exp(self.noise**2 / 2)
        plain_ms = emitted / num_rows * plain_step_ms * mean if num_drafted else target_ms
        self.plain_ms += plain_ms
        self.worst_plain_step_ms = max(self.worst_plain_step_ms, plain_step_ms)
        self.spent_ms += target_ms + propose_ms
        self._loss_ms = max(self._loss_ms + target_ms + propose_ms - 1.01 * plain_ms, 0.0)
        self.lost_steps = max(self.lost_steps, self._loss_ms / self.worst_plain_step_ms)
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.allotted.append(list(lengths))

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.policy.forget(name)


def measured_costs(curve: Curve, distort: Callable[[], float], tokens: Sequence[int] = (1, 2, 4, 6, 8, 16, 32)) -> StepCosts:
    """A table of these numbers of tokens, each off by its own factor."""
    return StepCosts(target=tuple(TargetCost(1, count, 64, curve_ms(curve, count) * distort()) for count in tokens))


def world_facts(costs: StepCosts, max_draft_length: int = 5) -> EngineFacts:
    return EngineFacts(
        model_name="clock",
        architecture="llama",
        device="cpu",
        dtype="float32",
        vocab_size=11,
        max_model_len=8192,
        max_position_embeddings=8192,
        num_pages=1024,
        page_size=16,
        target_page_bytes=1,
        drafter_page_bytes=0,
        target_weight_bytes=1,
        drafter_weight_bytes=0,
        drafter="ngram",
        drafter_max_len=8192,
        max_draft_length=max_draft_length,
        eos_token_ids=(),
        choices=(),
        step_costs=costs,
    )
