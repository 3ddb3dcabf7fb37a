"""How many drafts each row may have in the next step. The scheduler asks here, then clamps to request, model and token budget.

Under the rule `coupled` the output never depends on the answer: a wrong length costs time, never a token.
"""

from dataclasses import dataclass
from typing import Protocol

from paceline.core.sequence import Sequence

NUM_MISSES_BEFORE_PAUSE = 4
FIRST_PAUSE_STEPS = 4
MAX_PAUSE_STEPS = 32


class DraftLengthPolicy(Protocol):
    """Decides a row's draft length. Called by the scheduler only."""

    def draft_length(self, sequence: Sequence, limit: int) -> int:
        """Drafts wanted for the step being planned, 0 .. limit; with 0 the drafter does not run for this row at all."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learns from one committed decode step of the row; `num_drafted` is 0 for a plain one."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops what was learned of a request that ended."""
        ...


@dataclass(slots=True)
class _Record:
    num_misses: int = 0  # drafted steps in a row without an accepted token
    next_pause_steps: int = FIRST_PAUSE_STEPS
    num_pause_steps_left: int = 0


class BackoffDraftLength:
    """The full length while drafts are accepted; after misses in a row half, a quarter, ... of it, then a pause of plain steps.

    A pause ends with a trial of one draft: another miss doubles the next pause up to MAX_PAUSE_STEPS, an accepted token restores the full
    length. A single miss changes nothing, for a drafter that is right with probability a misses one step in 1 / (1 - a): only
    misses in a row tell a drafter that does not pay from one that does.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def draft_length(self, sequence: Sequence, limit: int) -> int:
        """Drafts wanted for the step being planned, 0 .. limit."""
        record = self._records.get(sequence.request.request_id)
        if record is None or limit == 0:
            return limit
        if record.num_pause_steps_left:
            return 0
        return max(limit >> (record.num_misses - 1), 1)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Counts misses and pauses. Steps planned before a pause began may still bring drafts; their misses are not counted twice."""
        request_id = sequence.request.request_id
        if num_accepted:
            self._records.pop(request_id, None)
            return
        record = self._records.get(request_id)
        if record is not None and record.num_pause_steps_left:
            if num_drafted == 0:
                record.num_pause_steps_left -= 1
            return
        if num_drafted == 0:
            return
        if record is None:
            record = self._records[request_id] = _Record()
        record.num_misses += 1
        if record.num_misses >= NUM_MISSES_BEFORE_PAUSE:
            record.num_pause_steps_left = record.next_pause_steps
            record.next_pause_steps = min(2 * record.next_pause_steps, MAX_PAUSE_STEPS)

    def forget(self, request_id: str) -> None:
        """Drops what was learned of a request that ended."""
        self._records.pop(request_id, None)
