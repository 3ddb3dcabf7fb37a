"""One committed step in the numbers that decide about drafts: the draft length policy and the switchback both learn from it."""

from dataclasses import dataclass
from typing import Protocol


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
    num_allotted_tokens: int = 0  # drafts that were planned
    longest_draft: int = 0  # of any row
    num_late_tokens: int = 0  # run by the drafter beyond the two per row that drafting itself leaves behind; prompt chunks count in full


class ControlSteps(Protocol):
    """Says which steps are control steps, and learns from all of them. Called by the scheduler only."""

    def is_control(self) -> bool:
        """Whether the step being planned is one. Asked once per plan, also of plans that come to nothing for want of work."""
        ...

    def observe_step(self, step: StepObservation) -> None:
        """Learns from a committed step, in the order of the plans."""
        ...


class NoControlSteps:
    """Never a control step."""

    def is_control(self) -> bool:
        return False

    def observe_step(self, step: StepObservation) -> None:
        pass
