"""Steps on a fake clock, for the policy of draft lengths: what they take, what of the drafts stands, and what plain decoding would take.

A batch keeps its number of rows for a stretch, as under steady load; so the time that plain decoding needs for the same tokens is known.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.facts import EngineFacts, StepCosts, TargetCost
from paceline.scheduler.draft_length import DraftLengthPolicy, DraftRow, GuardedDraftLength
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
    """What a drafter is like, by step. `draft` draws how many of a row's drafts stand."""

    catch_up_ms = 0.0  # per token that a drafter with KV missed

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
    lost_steps: float = 0.0
    """The most that any stretch had lost once a step lost again, beyond 1/101 of all decoding time: in plain steps of that step's batch.

    So what a large batch lost counts as so many steps of a small one that follows, and what a slow machine lost of a fast one.
    """
    surprise_steps: float = 0.0  # by how much the slowest single drafter call exceeded what was expected of it, in its batch's steps
    decode_ms: float = 0.0
    keeps_kv: bool = False
    idle_ms: float = 0.0  # of a drafter that is allowed nothing
    num_pending: dict[str, int] = field(default_factory=dict[str, int])  # tokens that a drafter with KV did not run, by row
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
            DraftRow(name, self.max_draft_length if limits is None else limits[i], contexts[i], self._pending(name), num_tokens_to_go=1000)
            for i, name in enumerate(names)
        ]
        lengths = [0] * num_rows if self.policy.stays_plain(list(names)) else self.policy.allot(rows, 512)
        drafts = [drafter.draft(i, length, rng) for i, length in enumerate(lengths)]
        drafter.end_step(sum(lengths))
        num_drafted = sum(drafted for drafted, _ in drafts)
        emitted = sum(accepted for _, accepted in drafts) + num_rows
        own = rng.lognormvariate(0, self.noise) if self.noise else 1.0
        if self.spikes and rng.random() < self.spikes:
            own *= 3
        target_ms = self.speed * own * (curve_ms(self.curve, num_rows + num_drafted) + self.context_ms * context)
        num_late = sum(row.num_late_tokens for row, length in zip(rows, lengths, strict=True) if length)
        expected_ms = self._expected_ms(max(lengths), num_late)
        propose_ms = self.speed * (drafter.propose_ms(max(lengths)) + num_late * drafter.catch_up_ms) if max(lengths) else self.idle_ms
        for name, length, (drafted, accepted) in zip(names, lengths, drafts, strict=True):
            self.policy.observe(name, length, drafted, accepted)
            self.row_tokens[name] = self.row_tokens.get(name, 0) + accepted + 1
            self.num_pending[name] = 2 if length else self._pending(name) + 1
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
                num_late_tokens=num_late,
            )
        )
        plain_step_ms = self.plain_step_ms(num_rows, context)
        # The step's own factor would have struck plain steps alike: a plain step with the same one, the others at its mean.
        mean = (1 + 2 * self.spikes) * math.exp(self.noise**2 / 2)
        plain_ms = (own + (emitted / num_rows - 1) * mean) * plain_step_ms if num_drafted else target_ms
        self.plain_ms += plain_ms
        self.spent_ms += target_ms + propose_ms
        self.decode_ms += target_ms + propose_ms
        self._lose(target_ms + propose_ms - plain_ms, propose_ms - expected_ms, plain_step_ms, max(lengths) > 0)
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.allotted.append(list(lengths))

    def prompt_step(self, names: Sequence[str], contexts: Sequence[int], drafter: Drafter, newcomer: str, num_tokens: int) -> None:
        """A step of the rows `names` with a prompt chunk, of which only the drafter's time is against plain decoding."""
        rows = [DraftRow(name, self.max_draft_length, contexts[i], self._pending(name)) for i, name in enumerate(names)]
        rows.append(DraftRow(newcomer, self.max_draft_length, num_tokens, num_tokens, num_prompt_tokens=num_tokens))
        *others, is_run = self.policy.allot(rows, 512)
        assert not any(others), "no drafts beside a prompt chunk"
        num_late = num_tokens if is_run else 0
        expected_ms = self._expected_ms(0, num_late)
        propose_ms = self.speed * num_late * drafter.catch_up_ms if is_run else self.idle_ms
        target_ms = self.speed * curve_ms(self.curve, len(names) + num_tokens)
        for name in names:
            self.policy.observe(name, 0, 0, 0)
            self.num_pending[name] = self._pending(name) + 1
        self.num_pending[newcomer] = self._pending(newcomer) + num_tokens - num_late
        num_target = len(names) + num_tokens
        duration_ms, context = target_ms + propose_ms, sum(contexts)
        step = StepObservation(len(names), context, 0, len(names), num_target, True, False, duration_ms, propose_ms, 0, 0, num_late)
        self.policy.observe_step(step)
        self.spent_ms += duration_ms
        self.plain_ms += target_ms
        self._lose(propose_ms, propose_ms - expected_ms, self.plain_step_ms(len(rows), context), num_late > 0)

    def _pending(self, name: str) -> int:
        return self.num_pending.get(name, 0) if self.keeps_kv else 0

    def _expected_ms(self, longest: int, num_late: int) -> float:
        """Of the drafter, at worst, by what the policy knows before the step."""
        if not isinstance(self.policy, GuardedDraftLength):
            return 0.0
        cost = self.policy._costs.drafter
        return (cost.high_ms(longest) if longest else 0.0) + cost.high_catch_up_ms(num_late)

    def _lose(self, loss_ms: float, surprise_ms: float, plain_step_ms: float, is_asked: bool) -> None:
        self._loss_ms = max(self._loss_ms + loss_ms, 0.0)
        if is_asked and loss_ms > 0:
            self.lost_steps = max(self.lost_steps, (self._loss_ms - self.decode_ms / 101) / plain_step_ms)
            self.surprise_steps = max(self.surprise_steps, surprise_ms / plain_step_ms)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.policy.forget(name)
            self.num_pending.pop(name, None)


def measured_costs(curve: Curve, distort: Callable[[], float], tokens: Sequence[int] = (1, 2, 4, 6, 8, 16, 32)) -> StepCosts:
    """A table of these numbers of tokens, each off by its own factor."""
    return StepCosts(target=tuple(TargetCost(1, count, 64, curve_ms(curve, count) * distort()) for count in tokens))


def world_facts(costs: StepCosts, max_draft_length: int = 5, keeps_kv: bool = False) -> EngineFacts:
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
        drafter_page_bytes=int(keeps_kv),
        target_weight_bytes=1,
        drafter_weight_bytes=0,
        drafter="draft_model" if keeps_kv else "ngram",
        drafter_max_len=8192,
        max_draft_length=max_draft_length,
        eos_token_ids=(),
        choices=(),
        step_costs=costs,
    )
