"""Live traffic on a clock of its own, without an engine: rows that come and go, a drafter of a known worth, step times with noise.

What speculation gains is known by construction, so that what a switchback reports can be checked against it.
"""

import math
import random
from dataclasses import dataclass, field

from paceline.scheduler.observation import StepObservation
from paceline.scheduler.switchback import Switchback


@dataclass(frozen=True)
class Law:
    """How rows and steps behave. The times of a step do not depend on its rows: per row-second the ratio is the same."""

    acceptance: float = 0.6  # of every draft, given that those before were accepted
    num_drafts: int = 4
    plain_ms: float = 10.0
    speculative_ms: float = 16.0
    noise: float = 0.0  # standard deviation of the logarithm of a step's time
    correlation: float = 0.0  # of that noise from step to step
    drift: float = 0.0  # change of the logarithm of the times over 1,000 steps
    stall_share: float = 0.0  # steps that take five times as long
    catch_up_ms: float = 0.0  # per token that the drafter missed, in the first step behind a control block

    @property
    def acceptance_length(self) -> float:
        return sum(self.acceptance**i for i in range(self.num_drafts + 1))

    @property
    def speedup(self) -> float:
        return self.acceptance_length * self.plain_ms / self.speculative_ms


@dataclass
class Row:
    order: int
    num_tokens_left: int
    may_draft: bool = True
    num_tokens: int = 100
    is_new: bool = True
    num_committed: int = 0  # in decode
    time_ms: float = 0.0  # in decode


@dataclass
class Traffic:
    """Steps planned and committed one after the other, or one commit behind (`depth` 2)."""

    switchback: Switchback
    law: Law
    num_rows: int = 1
    output_tokens: int | None = None  # of a request, on average; None: rows never end
    num_plain_rows: int = 0  # rows that may not draft by their request, inside the batch
    depth: int = 1
    is_on: bool = True  # the guard's verdict
    seed: int = 0
    steps: list[StepObservation] = field(default_factory=list[StepObservation])
    rows: list[Row] = field(default_factory=list[Row])

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._level = 0.0
        self._num_missed = 0
        self._next_order = 0
        self._in_flight: list[bool] = []
        while len(self.rows) < self.num_rows:
            self._join(is_new=False)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self._in_flight) < self.depth:
                self._in_flight.append(self.switchback.is_control(self._can_last))
            self._commit(self._in_flight.pop(0))

    @property
    def control_ms(self) -> float:
        return sum(step.duration_ms for step in self.steps if step.is_control)

    @property
    def total_ms(self) -> float:
        return sum(step.duration_ms for step in self.steps)

    def _can_last(self, num_plain: int, num_speculative: int) -> bool:
        num_tokens = num_plain + num_speculative * (self.law.num_drafts + 1)
        return 2 * sum(row.num_tokens_left > num_tokens for row in self.rows) >= len(self.rows)

    def _join(self, is_new: bool = True) -> None:
        left = 1 << 30 if self.output_tokens is None else 1 + int(self.random.uniform(0.5, 1.5) * self.output_tokens)
        if not is_new and self.output_tokens is not None:
            left = 1 + int(self.random.random() * left)
        may_draft = sum(not row.may_draft for row in self.rows) >= self.num_plain_rows
        self.rows.append(Row(self._next_order, left, may_draft, is_new=is_new))
        self._next_order += 1

    def _commit(self, is_control: bool) -> None:
        decoding = [row for row in self.rows if not row.is_new]
        has_prefill = len(decoding) < len(self.rows)
        drafting = [row for row in decoding if row.may_draft and self.is_on and not is_control]
        step_ms = self._time_ms(bool(drafting)) + 30 * has_prefill
        self._num_missed = self._num_missed + len(decoding) if is_control else 0
        num_context_tokens = sum(row.num_tokens for row in decoding)
        tokens: dict[int, int] = {}
        num_emitted = 0
        for row in decoding:
            num_new = min(1 + self._num_accepted() if row in drafting else 1, row.num_tokens_left)
            row.num_tokens += num_new
            row.num_tokens_left -= num_new
            row.num_committed += num_new
            row.time_ms += step_ms
            num_emitted += num_new
            if row.num_tokens_left:
                tokens[row.order] = num_new
        step = StepObservation(
            num_rows=len(decoding),
            num_context_tokens=num_context_tokens,
            num_drafted_tokens=self.law.num_drafts * len(drafting),
            num_emitted_tokens=num_emitted,
            num_target_tokens=len(decoding) + self.law.num_drafts * len(drafting),
            has_prefill=has_prefill,
            is_control=is_control,
            duration_ms=step_ms,
            propose_ms=0.0,
            num_allotted_tokens=self.law.num_drafts * len(drafting),
            tokens_by_row=tokens,
        )
        self.steps.append(step)
        self.switchback.observe_step(step)
        self.rows = [row for row in self.rows if row.num_tokens_left]
        for row in self.rows:
            row.is_new = False
        while len(self.rows) < self.num_rows:
            self._join()

    def _time_ms(self, is_speculative: bool) -> float:
        law = self.law
        shock = self.random.gauss(0, law.noise * math.sqrt(1 - law.correlation**2))
        self._level = law.correlation * self._level + shock
        factor = math.exp(self._level + law.drift * len(self.steps) / 1000)
        stall = 5.0 if self.random.random() < law.stall_share else 1.0
        catch_up_ms = law.catch_up_ms * self._num_missed if is_speculative else 0.0
        return (law.speculative_ms if is_speculative else law.plain_ms) * factor * stall + catch_up_ms

    def _num_accepted(self) -> int:
        num = 0
        while num < self.law.num_drafts and self.random.random() < self.law.acceptance:
            num += 1
        return num
