"""Measures on live traffic what speculation gains: now and then a short block of steps without drafts, between two with them.

The scheduler asks before each plan and reports each committed step. A few requests without drafts inside a drafting batch would not do for
a comparison: they pay for the drafts of the others, so they tell how many tokens a step yields, not how fast plain decoding is.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from paceline.core.stats import Speedup
from paceline.scheduler.bands import rows_context_band
from paceline.scheduler.observation import StepObservation
from paceline.scheduler.speedup import SpeedupEstimator, Triple

NUM_BLOCK_STEPS = 16
"""Steps of a control block that count."""
NUM_FLANK_STEPS = 8
"""Steps of each speculative block that count: both together as many as the control block between them."""
NUM_DROPPED_STEPS = 2
"""Steps at the start of a block that do not count: what the block before left in flight and in the caches would blur the difference."""
_COST_STEPS = NUM_BLOCK_STEPS + NUM_DROPPED_STEPS
_MAX_CONTROL_STEPS = 2 * _COST_STEPS  # with those that do not count because of a prompt


class _Phase(Enum):
    BEFORE = auto()  # speculative steps, of which the last ones may become the block before a control block
    CONTROL = auto()  # from the decision for a control block to the first speculative step behind it
    AFTER = auto()


class Switchback:
    """Decides which steps are control steps, and keeps the triples of blocks (speculative, control, speculative).

    The schedule: every step in which some row may draft earns `share` of its time, every control step spends its own. A block becomes due
    when the earnings cover its cost between one and two times; the factor is drawn anew for each block, so that blocks cannot keep step
    with the traffic. So control blocks take at most `share` of the time; as plain steps are not lost, only slower by the speed-up, they
    cost `share` x (1 - 1 / speed-up). Where no row may draft (no drafter, speculation off, every request with K = 0) nothing is earned.
    A block that is due waits for a drawn number of steps: slow steps bring a block closer, and must not be what it is compared with.

    The rules of a triple:
    - Steps with a prompt chunk do not count, nor do the first NUM_DROPPED_STEPS of a block. After a control block they do count if the
      drafter keeps KV: they hold the catch-up that speculation has to pay.
    - Only rows that run on in every step of the triple count, with their share of the time: rows that join or end are cut from it. When
      they are less than half of a batch, the triple is dropped, and a control block ends at once.
    - A block begins only if at least half of the rows are sure to have enough tokens to go. Otherwise rows that happen to accept many
      drafts would end too soon to count.
    - The block behind counts as speculative even if drafting pauses in it: what it is compared with is what users get.
    - Rows that are not allowed drafts by their request count alike in all blocks.
    """

    def __init__(self, share: float, drafter_keeps_kv: bool, seed: int = 0, estimator: SpeedupEstimator | None = None) -> None:
        """`share` of the time, 0 .. 1; 0 never begins a block."""
        self._share = share
        self._keeps_kv = drafter_keeps_kv
        self._random = random.Random(seed)  # noqa: S311 - spreads blocks over time, guards nothing
        self._estimator = SpeedupEstimator(seed) if estimator is None else estimator
        self._phase = _Phase.BEFORE
        self._balance_ms = 0.0
        self._margin = self._draw_margin()
        self._num_steps_to_wait: int | None = None  # of a block that is due
        self._flank: deque[StepObservation] = deque(maxlen=NUM_FLANK_STEPS)
        self._is_block_on = False  # the next plan is a control step
        self._num_control_steps = 0  # of the block, those that do not count included
        self._num_to_drop = 0
        self._rows: set[int] = set()  # that every step of the triple has
        self._before: list[StepObservation] = []
        self._control: list[StepObservation] = []
        self._after: list[StepObservation] = []

    def is_control(self, can_last: Callable[[int, int], bool]) -> bool:
        """Whether the step being planned is a control step; may begin a block."""
        if self._phase is _Phase.BEFORE and self._may_begin() and can_last(_COST_STEPS, NUM_DROPPED_STEPS + NUM_FLANK_STEPS):
            self._phase = _Phase.CONTROL
            self._is_block_on = True
            self._num_control_steps = 0
            self._control = []
            self._margin = self._draw_margin()
            self._num_steps_to_wait = None
        return self._is_block_on

    def observe_step(self, step: StepObservation) -> None:
        """Takes in a committed step. With several in flight, steps planned before a block began or ended come late."""
        self._account(step)
        if self._phase is _Phase.CONTROL:
            if step.is_control:
                self._observe_control(step)
            elif self._num_control_steps:
                self._phase = _Phase.AFTER
                self._num_to_drop = 0 if self._keeps_kv else NUM_DROPPED_STEPS
                self._after = []
                self._observe_after(step)
            else:
                self._add_to_flank(step)
        elif self._phase is _Phase.AFTER:
            self._observe_after(step)
        elif not step.is_control:
            self._add_to_flank(step)
            self._count_down()

    def speedups(self) -> tuple[Speedup, ...]:
        """By band of batch and context, of those with enough triples."""
        return self._estimator.speedups()

    # The schedule

    def _draw_margin(self) -> float:
        return self._random.uniform(1, 2)

    def _account(self, step: StepObservation) -> None:
        if step.is_control:
            self._balance_ms -= (1 - self._share) * step.duration_ms
        elif step.num_allotted_tokens and self._num_steps_to_wait != 0:  # nothing is saved up while a block is kept from beginning
            self._balance_ms += self._share * step.duration_ms

    def _may_begin(self) -> bool:
        return self._num_steps_to_wait == 0 and self._has_flank()

    def _count_down(self) -> None:
        """After each step of the phase BEFORE: to when a block is due, then to when it may begin."""
        if self._num_steps_to_wait is not None:
            self._num_steps_to_wait = max(self._num_steps_to_wait - 1, 0)
            return
        if len(self._flank) < NUM_FLANK_STEPS:
            return
        # A plain step takes no longer than a speculative one, or hardly: what it takes in excess is paid back before the next block.
        cost_ms = _COST_STEPS * sum(step.duration_ms for step in self._flank) / len(self._flank)
        if self._balance_ms >= self._margin * cost_ms:
            self._balance_ms = min(self._balance_ms, 2 * cost_ms)  # nor from when there was none to compare with
            self._num_steps_to_wait = self._random.randint(NUM_FLANK_STEPS, 2 * NUM_FLANK_STEPS)
            self._flank.clear()  # so no triple shares a block with the one before, either: its error would count twice

    # The triple

    def _add_to_flank(self, step: StepObservation) -> None:
        if not step.has_prefill and step.tokens_by_row:
            self._flank.append(step)

    def _has_flank(self) -> bool:
        """Whether there are enough steps, half of which may draft, and the same rows are at least half of the batch in all of them."""
        if len(self._flank) < NUM_FLANK_STEPS or 2 * sum(step.num_allotted_tokens > 0 for step in self._flank) < NUM_FLANK_STEPS:
            return False
        return 2 * len(_same_rows(self._flank)) >= max(step.num_rows for step in self._flank)

    def _observe_control(self, step: StepObservation) -> None:
        if self._num_control_steps == 0:
            self._before = list(self._flank)
            self._rows = _same_rows(self._before)
            self._num_to_drop = NUM_DROPPED_STEPS
        self._num_control_steps += 1
        if not self._keep_rows(step) or self._num_control_steps > _MAX_CONTROL_STEPS:
            self._start_over()
            return
        if self._counts(step):
            self._control.append(step)
            self._is_block_on = len(self._control) < NUM_BLOCK_STEPS

    def _observe_after(self, step: StepObservation) -> None:
        if not self._keep_rows(step):
            self._start_over()
        elif self._counts(step):
            self._after.append(step)
            if len(self._after) == NUM_FLANK_STEPS:
                self._finish()

    def _keep_rows(self, step: StepObservation) -> bool:
        """Leaves only rows that this step has too; False if they are less than half of it."""
        self._rows = self._rows & step.tokens_by_row.keys()
        return bool(self._rows) and 2 * len(self._rows) >= step.num_rows

    def _counts(self, step: StepObservation) -> bool:
        if self._num_to_drop:
            self._num_to_drop -= 1
            return False
        return not step.has_prefill

    def _finish(self) -> None:
        num_steps = len(self._control)
        num_rows = sum(step.num_rows for step in self._control) / num_steps
        num_context_tokens = sum(step.num_context_tokens for step in self._control) / num_steps
        speculative = _tokens_and_time((*self._before, *self._after), self._rows)
        control = _tokens_and_time(self._control, self._rows)
        self._estimator.add(Triple(rows_context_band(num_rows, num_context_tokens), *speculative, *control))
        self._start_over()

    def _start_over(self) -> None:
        self._phase = _Phase.BEFORE
        self._is_block_on = False


def _same_rows(steps: Iterable[StepObservation]) -> set[int]:
    """Rows that all steps have; there is at least one step."""
    first, *others = (step.tokens_by_row.keys() for step in steps)
    return set(first).intersection(*others)


def _tokens_and_time(steps: Sequence[StepObservation], rows: set[int]) -> tuple[int, float]:
    """What `rows` had of `steps`: committed tokens, and rows x seconds."""
    num_tokens = sum(step.tokens_by_row[row] for step in steps for row in rows)
    return num_tokens, len(rows) * sum(step.duration_ms for step in steps) / 1e3
