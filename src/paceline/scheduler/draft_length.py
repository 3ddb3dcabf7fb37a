"""How many drafts each row may have in the next step. The scheduler asks here, once per step, and divides the token budget accordingly.

Under the rule `coupled` the output never depends on the answer: a wrong length costs time, never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.scheduler.observation import StepObservation

NUM_MISSES_BEFORE_PAUSE = 4
FIRST_PAUSE_STEPS = 4
MAX_PAUSE_STEPS = 32


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row of the step being planned."""

    request_id: str
    limit: int  # most drafts that it could use; 0 for a row that must not or cannot have any
    num_context_tokens: int
    num_catch_up_tokens: int  # what the drafter must run before it can propose; 0 if it keeps no KV
    num_prompt_tokens: int = 0  # above 0: a prompt chunk of so many tokens, which itself has no drafts


class DraftLengthPolicy(Protocol):
    """Decides draft lengths. Called by the scheduler only."""

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        """Drafts wanted for each row of the step, 0 .. its limit; with 0 the drafter does not run for the row at all.

        `num_tokens_left`: what drafts and catch-up may cost together. For a prompt chunk a number above 0 only means that the drafter
        shall run its tokens.
        """
        ...

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learns from one committed decode step of a row; `num_drafted` is 0 for a plain one."""
        ...

    def observe_step(self, step: StepObservation) -> None:
        """Learns from a committed step as a whole, after its rows."""
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

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        """Every row by its own record."""
        return [self._length(row) for row in rows]

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Counts misses and pauses. Steps planned before a pause began may still bring drafts; their misses are not counted twice."""
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

    def observe_step(self, step: StepObservation) -> None:
        """Steps as such teach nothing here."""

    def forget(self, request_id: str) -> None:
        """Drops what was learned of a request that ended."""
        self._records.pop(request_id, None)

    def _length(self, row: DraftRow) -> int:
        record = self._records.get(row.request_id)
        if record is None or row.limit == 0:
            return row.limit
        if record.num_pause_steps_left:
            return 0
        return max(row.limit >> (record.num_misses - 1), 1)
