"""One committed step in the numbers that decide about drafts: the draft length policy and the switchback both learn from it."""

from dataclasses import dataclass


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
