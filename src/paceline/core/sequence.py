"""A request while it runs: the committed tokens and the integers that rule them. Only the scheduler changes one."""

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.core.outcome import DraftStats
from paceline.core.request import FinishReason, Request


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # no slot, no pages; also after preemption
    RUNNING = "running"  # owns a slot and pages
    FINISHED = "finished"  # has a finish reason; may still own pages while a step that was planned with it is in flight


@dataclass(slots=True)
class Sequence:
    """Host-side state of one request.

    `token_ids` is the committed truth (prompt, then output). `num_computed_tokens` leading tokens have valid target KV,
    `num_draft_computed_tokens` have valid drafter KV. No field ever holds a draft token: a draft does not outlive its step.
    """

    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    slot: int | None = None
    num_computed_tokens: int = 0
    num_draft_computed_tokens: int = 0
    page_ids: list[int] = field(default_factory=list[int])
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    draft_stats: DraftStats = field(default_factory=DraftStats)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Committed tokens whose target KV is not yet valid: a prompt remainder, or 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens
