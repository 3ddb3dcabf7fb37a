"""One committed step in the numbers that decide about drafts: the draft length policy and the switchback both learn from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.stats import Speedup


@dataclass(frozen=True, slots=True)
class StepObservation:
    """Made by the scheduler at the commit of a step; rows are those in decode, unless said otherwise."""

    num_rows: int
    num_context_tokens: int  # tokens of all rows before the step, together: what attention reads
    num_drafted_tokens: int
    num_emitted_tokens: int  # committed to rows that still ran
    num_target_tokens: int  # everything that the target ran, prompt chunks and drafts included
    has_prefill: bool
    is_control: bool  # planned with no drafts for any row, to learn what plain decoding costs
    duration_ms: float
    propose_ms: float  # the part of it that the drafter took
    num_allotted_tokens: int = 0  # drafts that were planned, whether or not the drafter had any
    longest_draft: int = 0  # planned for any row
    num_late_tokens: int = 0  # run by the drafter beyond the two per row that drafting itself leaves behind; prompt chunks count in full
    tokens_by_row: Mapping[int, int] = field(default_factory=dict[int, int])  # committed to each row that runs on, by its order of arrival


class ControlSteps(Protocol):
    """Says which steps are control steps, and learns from all of them. Called by the scheduler only."""

    def is_control(self, can_last: Callable[[int, int], bool]) -> bool:
        """Whether the step being planned is one. Asked once per plan, also of plans that come to nothing for want of work.

        `can_last(n, m)`: whether nobody waits and at least half of the running rows have tokens to go for n plain steps and then m
        speculative ones, however many drafts are accepted.
        """
        ...

    def observe_step(self, step: StepObservation) -> None:
        """Learns from a committed step, in the order of the plans."""
        ...

    def speedups(self) -> tuple[Speedup, ...]:
        """What the control steps showed so far."""
        ...
