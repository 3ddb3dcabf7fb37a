"""What steps cost, in milliseconds: a table measured at start, refined by every committed step. The draft length policy asks here.

Speed changes as a whole (a slow neighbour, a hot processor) far more than the ratio of two kinds of steps does. So plain steps give
the level of a place (a range of batch and context); drafting steps only correct the ratio to it, where plain steps on both sides agree.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from paceline.core.facts import EngineFacts, StepCosts
from paceline.scheduler.bands import band_numbers
from paceline.scheduler.observation import StepObservation

NUM_REFERENCE_STEPS = 3
"""Plain steps that a place needs before anything is drafted in it, and when it seems to have changed."""
MAX_STEPS_WITHOUT_REFERENCE = 256
MAX_STEPS_AWAY = 32
"""After more steps in other places, or a change of speed seen there, what is known of a place must be confirmed."""
_MAX_DEVIATION = 1.2
"""Drafting steps that differ by more from what is expected, for a while, call for new plain steps: they tell what has changed."""
_LEVEL_TOLERANCE = 1.15
_DEAD_ZONE = 0.03  # corrections smaller than noise would decide where drafts cost as little as that
_NUM_RECENT = 5
_NUM_KEPT = 9
_MAX_PENDING = 32
_UNKNOWN_SHARE = 0.25  # of a plain step as measured at start, what is sure to be needed before live steps were seen
_HIGH_TARGET = 1.25  # a step's target time in the worst case, as a multiple of the expected
_TOKEN_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_PRIOR = ((1, 1.0), (2, 1.1), (4, 1.7), (8, 2.1), (16, 4.0), (64, 13.0))
"""Where nothing was measured: relative time by tokens, as on a CPU with half-precision weights."""
_PRIOR_PLAIN_MS = 30.0
_PRIOR_SHARE = 0.2  # of a draft model of unknown size
_PRIOR_LOOKUP_SHARE = 0.002  # of a drafter without a model: so little that it is tried before it is judged
_PRIOR_LOOKUP_HIGH_SHARE = 0.2  # if it goes badly: the first call may read all tokens before it
_CATCH_UP_DISCOUNT = 0.2  # time per token of the drafter's catch-up, as a share of that of a draft: its tokens run together


class TargetTable:
    """Relative or absolute time of the target's pass by number of tokens: what was measured, with straight lines between."""

    def __init__(self, costs: StepCosts) -> None:
        sums: dict[int, list[float]] = {}
        short = min((cost.num_context_tokens for cost in costs.target), default=0)
        for cost in costs.target:
            if cost.num_context_tokens == short:
                sums.setdefault(cost.num_tokens, []).append(cost.ms)
        points = sorted((tokens, min(times)) for tokens, times in sums.items()) or [(1, _PRIOR_PLAIN_MS)]
        last_tokens, last_ms = points[-1]
        points += [(tokens, last_ms * share / _prior(last_tokens)) for tokens, share in _PRIOR if tokens > last_tokens]
        self._tokens: list[int] = []
        self._ms: list[float] = []
        for tokens, ms in points:
            self._tokens.append(tokens)
            self._ms.append(max(ms, self._ms[-1] if self._ms else 0.0))  # more tokens never take less: that is noise
        self._slope_ms = _context_slope(costs, short)
        self._short = short
        self._known: dict[int, float] = {}

    def ms(self, num_tokens: int) -> float:
        """With the short contexts that the table was measured at."""
        base = self._known.get(num_tokens)
        if base is None:
            base = self._known[num_tokens] = self._interpolated(num_tokens)
        return base

    def context_ms(self, num_rows: int, num_context_tokens: int) -> float:
        """What longer contexts, `num_context_tokens` of all rows together, add to every step."""
        return self._slope_ms * max(num_context_tokens - num_rows * self._short, 0)

    def _interpolated(self, num_tokens: int) -> float:
        tokens, ms = self._tokens, self._ms
        if len(tokens) == 1:
            return ms[0] * max(num_tokens / tokens[0], 1.0)
        upper = min(max(bisect_left(tokens, num_tokens), 1), len(tokens) - 1)
        slope = (ms[upper] - ms[upper - 1]) / (tokens[upper] - tokens[upper - 1])
        return max(ms[upper - 1] + slope * (num_tokens - tokens[upper - 1]), ms[0])


def _prior(num_tokens: int) -> float:
    """Relative time of so many tokens where only fewer were measured."""
    (low, low_share), (high, high_share) = _PRIOR[-2:]
    for (left, left_share), (right, right_share) in pairwise(_PRIOR):
        if num_tokens <= right:
            (low, low_share), (high, high_share) = (left, left_share), (right, right_share)
            break
    return low_share + (high_share - low_share) * (num_tokens - low) / (high - low)


def _context_slope(costs: StepCosts, short: int) -> float:
    """Milliseconds per context token, from measurements that differ in context alone."""
    base = {(cost.num_rows, cost.num_tokens): cost.ms for cost in costs.target if cost.num_context_tokens == short}
    slopes = [
        (cost.ms - base[cost.num_rows, cost.num_tokens]) / (cost.num_rows * (cost.num_context_tokens - short))
        for cost in costs.target
        if cost.num_context_tokens > short and (cost.num_rows, cost.num_tokens) in base
    ]
    return max(median_low(slopes), 0.0) if slopes else 0.0


@dataclass(slots=True)
class Place:
    """A range of batch and context, with what live steps taught of it. Ratios are to the table."""

    plain: deque[float] = field(default_factory=lambda: deque[float](maxlen=_NUM_KEPT))
    level: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=_NUM_RECENT))  # drafting steps: measured / expected
    pending: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=_MAX_PENDING))
    corrections: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])  # by token knot
    factors: dict[int, float] = field(default_factory=dict[int, float])  # what `correction` found, until there is more to find
    num_references_due: int = NUM_REFERENCE_STEPS
    num_steps_since_plain: int = 0
    last_step: int = 0  # of the model's, here
    epoch: int = 0  # the model's count of changes of speed, as known here
    num_steps_since_call: int = 3 * _NUM_RECENT  # for new plain steps

    @property
    def needs_reference(self) -> bool:
        """Whether the next step here should be a plain one."""
        return self.num_references_due > 0 or self.num_steps_since_plain >= MAX_STEPS_WITHOUT_REFERENCE

    def doubt(self) -> None:
        """What is known may be out of date."""
        self.num_references_due = max(self.num_references_due, NUM_REFERENCE_STEPS)
        self.pending.clear()
        self.recent.clear()

    @property
    def caution(self) -> float:
        """Factor, at most 1: drafting steps that have lately become faster than expected hint that plain ones have, too."""
        return min(median_low(self.recent), 1.0) if len(self.recent) > 1 else 1.0

    def observe_plain(self, ratio: float) -> bool:
        """Returns whether the speed has changed."""
        self.plain.append(ratio)
        self.num_references_due = max(self.num_references_due - 1, 0)
        self.num_steps_since_plain = 0
        before = self.level
        has_changed = False
        if before is not None and len(self.plain) >= NUM_REFERENCE_STEPS:
            newest = list(self.plain)[-NUM_REFERENCE_STEPS:]
            is_slower = min(newest) > before * _LEVEL_TOLERANCE
            is_faster = max(newest) * _LEVEL_TOLERANCE < before
            has_changed = is_slower or is_faster
            if has_changed:
                self.plain.clear()
                self.plain.extend(newest)
                self.pending.clear()
                self.recent.clear()
        self.level = median_low(self.plain)
        if self.pending and before is not None and self.num_references_due == 0:
            self._settle_pending()
        return has_changed

    def _settle_pending(self) -> None:
        """Plain steps on both sides agree, so what lies between was measured against the level."""
        assert self.level is not None, "a plain step has given the level"
        for knot, ratio in self.pending:
            self.corrections.setdefault(knot, deque(maxlen=_NUM_KEPT)).append(ratio / self.level)
        self.recent.clear()
        self.factors.clear()
        self.pending.clear()

    def observe_drafting(self, knot: int, ratio: float) -> None:
        """`knot`: of the step's target tokens."""
        self.num_steps_since_plain += 1
        self.num_steps_since_call += 1
        self.pending.append((knot, ratio))
        if self.level is None:
            return
        self.recent.append(ratio / (self.level * self.correction(knot)))
        if len(self.recent) < _NUM_RECENT or self.num_steps_since_call < 3 * _NUM_RECENT:
            return
        middle = median_low(self.recent)
        if not 1 / _MAX_DEVIATION <= middle <= _MAX_DEVIATION:
            self.num_references_due = NUM_REFERENCE_STEPS
            self.num_steps_since_call = 0

    def correction(self, knot: int) -> float:
        """Of the table's ratio between a step of so many tokens and a plain one; where none was measured, of the nearest fewer tokens."""
        factor = self.factors.get(knot)
        if factor is None:
            nearest = max((other for other in self.corrections if other <= knot), default=None)
            factor = 1.0 if nearest is None else median_low(self.corrections[nearest])
            if nearest != knot:
                factor = max(factor, 1.0)
            if abs(factor - 1) < _DEAD_ZONE:
                factor = 1.0
            self.factors[knot] = factor
        return factor


class CostModel:
    """Milliseconds of steps to come, by place."""

    def __init__(self, facts: EngineFacts) -> None:
        self.drafter = DrafterCost(facts)
        self._table = TargetTable(facts.step_costs)
        self._places: dict[tuple[int, int], Place] = {}
        self._level = 1.0  # of the place that was last seen
        self._level_at_start = 1.0 if facts.step_costs.target else None  # the table is what the machine can do, unless it is a guess
        self._least_level: float | None = None  # of that and what any place ever had; None before the first live steps
        self._num_steps = 0
        self._epoch = 0

    def place(self, num_rows: int, num_context_tokens: int) -> Place:
        """`num_context_tokens`: of all rows together."""
        band = band_numbers(num_rows, num_context_tokens)
        place = self._places.get(band)
        if place is None:
            place = self._places[band] = Place()
        if place.epoch != self._epoch or self._num_steps - place.last_step > MAX_STEPS_AWAY:
            place.doubt()
            place.epoch, place.last_step = self._epoch, self._num_steps
        return place

    def batch(self, num_rows: int, num_context_tokens: int) -> "BatchCost":
        """Costs of steps of these rows, as known now."""
        place = self.place(num_rows, num_context_tokens)
        level = self._level if place.level is None else place.level
        return BatchCost(self._table, place, level, num_rows, self._table.context_ms(num_rows, num_context_tokens))

    def observe(self, step: StepObservation) -> None:
        """Learns from a step without prompt chunks."""
        self._num_steps += 1
        place = self.place(step.num_rows, step.num_context_tokens)
        place.last_step = self._num_steps
        target_ms = step.duration_ms - step.propose_ms
        context_ms = self._table.context_ms(step.num_rows, step.num_context_tokens)
        ratio = target_ms / (self._table.ms(step.num_target_tokens) + context_ms)
        if step.num_drafted_tokens == 0:
            if place.observe_plain(ratio):
                self._epoch += 1
                place.epoch = self._epoch
            self._level = place.level if place.level is not None else self._level
            self._note_least(place)
            self.drafter.observe_plain(self._table.ms(1) * self._level)
        else:
            place.observe_drafting(_knot(step.num_target_tokens), ratio)

    def least_plain_ms(self) -> float:
        """The shortest plain step that may follow, as far as is known: of one row with a short context, on the machine at its fastest."""
        return self._table.ms(1) * (_UNKNOWN_SHARE if self._least_level is None else self._least_level)

    def _note_least(self, place: Place) -> None:
        if place.level is None or len(place.plain) < NUM_REFERENCE_STEPS:
            return
        before = self._level_at_start if self._least_level is None else self._least_level
        self._least_level = place.level if before is None else min(before, place.level)


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Milliseconds of one batch's steps, without the drafter's time."""

    table: TargetTable
    place: Place
    level: float
    num_rows: int
    context_ms: float

    @property
    def plain_ms(self) -> float:
        """A plain step: low where noise only adds, being a median of what was measured lately."""
        return (self.table.ms(self.num_rows) + self.context_ms) * self.level

    @property
    def low_plain_ms(self) -> float:
        """The same where too much would be dangerous."""
        return self.plain_ms * self.place.caution

    def target_ms(self, num_tokens: int) -> float:
        """A step with so many target tokens."""
        factor = 1.0 if num_tokens == self.num_rows else self.place.correction(_knot(num_tokens))
        return (self.table.ms(num_tokens) + self.context_ms) * self.level * factor

    def worst_ms(self, num_tokens: int) -> float:
        """The same if it goes badly."""
        return _HIGH_TARGET * self.target_ms(num_tokens)


def _knot(num_tokens: int) -> int:
    """The largest knot up to `num_tokens`."""
    return _TOKEN_KNOTS[bisect_right(_TOKEN_KNOTS, num_tokens) - 1]


class DrafterCost:
    """Milliseconds of the drafter, by the longest draft of a step; and of running tokens that it missed."""

    def __init__(self, facts: EngineFacts) -> None:
        self._keeps_kv = facts.drafter_keeps_kv
        # Of a plain step's time, what a draft takes until it was measured.
        self._share = _PRIOR_LOOKUP_SHARE
        if facts.drafter_keeps_kv:
            has_sizes = facts.drafter_weight_bytes > 0 and facts.target_weight_bytes > 0
            self._share = min(facts.drafter_weight_bytes / facts.target_weight_bytes, 1.0) if has_sizes else _PRIOR_SHARE
        self._plain_ms = _PRIOR_PLAIN_MS
        self._measured = {cost.num_drafts: cost.ms for cost in sorted(facts.step_costs.drafter, key=lambda cost: -cost.num_rows)}
        self._by_length: dict[int, deque[float]] = {}
        self._per_token: deque[float] = deque(maxlen=_NUM_KEPT)
        self._known: dict[int, float] = {}  # what `ms` found, until there is more to find

    def ms(self, longest: int) -> float:
        """A step whose longest draft has so many tokens, once the drafter has caught up."""
        if longest == 0:
            return 0.0
        known = self._known.get(longest)
        if known is None:
            known = self._known[longest] = self._estimate(longest)
        return known

    def _estimate(self, longest: int) -> float:
        # The first proposals may build an index: what they take is high, and nothing makes a step too short.
        live = {length: min(times) if len(times) < 3 else median_low(times) for length, times in self._by_length.items()}
        return self._scaled(live or self._measured or {1: self._share * self._plain_ms}, longest)

    def high_ms(self, longest: int) -> float:
        """The same if it goes badly: the slowest of the latest steps."""
        live = {length: max(times) for length, times in self._by_length.items()}
        high_ms = self._scaled(live, longest) if live else 0.0
        if not live and not self._keeps_kv:
            high_ms = _PRIOR_LOOKUP_HIGH_SHARE * self._plain_ms
        return max(high_ms, 1.5 * self.ms(longest))

    def catch_up_ms(self, num_tokens: int) -> float:
        """Running `num_tokens` tokens that the drafter missed."""
        return num_tokens * (median_low(self._per_token) if self._per_token else self.ms(1) * _CATCH_UP_DISCOUNT)

    def high_catch_up_ms(self, num_tokens: int) -> float:
        """The same if it goes badly: the slowest of the latest."""
        return max(num_tokens * max(self._per_token, default=0.0), self.catch_up_ms(num_tokens))

    def observe_plain(self, plain_ms: float) -> None:
        """What the step of one row takes without drafts: the measure of a drafter that was not measured yet."""
        if not self._by_length:
            self._plain_ms = plain_ms
            self._known.clear()

    def observe(self, propose_ms: float, longest: int, num_late_tokens: int) -> None:
        """`num_late_tokens`: caught up beyond what every drafting step does. Such a step teaches what catching up costs, and only that."""
        if num_late_tokens > 0:
            self._per_token.append(max(propose_ms - self.ms(longest), 0.0) / num_late_tokens)
        elif longest > 0:
            times = self._by_length.setdefault(longest, deque(maxlen=_NUM_RECENT))
            if times and propose_ms < median_low(times) / 2:  # noise only adds: it has become faster
                self._by_length.clear()
                times = self._by_length.setdefault(longest, deque(maxlen=_NUM_RECENT))
            times.append(propose_ms)
            self._known.clear()

    def _scaled(self, times: dict[int, float], longest: int) -> float:
        nearest = min(times, key=lambda length: abs(length - longest))
        if not self._keeps_kv or nearest == longest:
            return times[nearest]
        return times[nearest] * longest / nearest
