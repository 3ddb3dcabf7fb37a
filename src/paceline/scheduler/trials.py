"""When something that does not pay may be tried again: intervals that double with every failure, and a budget for all of them together."""

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_INTERVAL_STEPS = 8
MAX_INTERVAL_STEPS = 256
SHARE = 0.005
"""Of all decoding time, what trials may lose; beside NUM_FREE_STEPS plain steps."""
NUM_FREE_STEPS = 5
MAX_PAUSE_STEPS = 32
"""Between the trials of different requests, after failures in a row."""


@dataclass(slots=True)
class _Retry:
    due_step: int
    interval_steps: int = FIRST_INTERVAL_STEPS


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial in flight."""

    key: str
    length: int  # drafts of the row that is tried
    loss_ms: float  # if none of them is accepted
    drafter_ms: float = 0.0  # the part of it that is lost even if the drafter has nothing to propose
    is_of_time: bool = False  # to see what the drafter takes: accepted drafts make no success


class Trials:
    """Retries by key, usually a request's id; and the trials in flight by request."""

    def __init__(self) -> None:
        self._retries: dict[str, _Retry] = {}
        self._in_flight: dict[str, Trial] = {}
        self._lost_ms = 0.0
        self._pause_steps = 1
        self._next_step = 0  # before it nothing is tried

    def is_due(self, key: str, step: int) -> bool:
        """Whether `key` may be tried in this step; a key that is new is, half an interval later."""
        retry = self._retries.get(key)
        if retry is None:
            retry = self._retries[key] = _Retry(step + FIRST_INTERVAL_STEPS // 2)
        return step >= max(retry.due_step, self._next_step)

    def next_step(self, keys: Iterable[str], step: int) -> int | None:
        """The first step after `step` in which another of `keys` becomes due; None if none is known to."""
        dues = (max(self._retries[key].due_step, self._next_step) for key in keys if key in self._retries)
        return min((due for due in dues if due > step), default=None)

    def can_lose(self, loss_ms: float, elapsed_ms: float, plain_ms: float) -> bool:
        """Whether the budget covers one more trial."""
        return self._lost_ms + loss_ms <= SHARE * elapsed_ms + NUM_FREE_STEPS * plain_ms

    def begin(self, request_id: str, trial: Trial, step: int) -> None:
        """Books the loss; it is given back if the trial succeeds."""
        self._lost_ms += trial.loss_ms
        self._in_flight[request_id] = trial
        retry = self._retries[trial.key]
        retry.due_step = step + retry.interval_steps
        self._next_step = step + self._pause_steps

    def end(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """What came of the trial of a request, if there was one. A success is followed by the next trial at once."""
        trial = self._in_flight.pop(request_id, None)
        if trial is None:
            return
        retry = self._retries.get(trial.key)
        is_success = num_accepted >= trial.length and not trial.is_of_time
        has_drafted = num_drafted >= trial.length
        if is_success or not has_drafted:
            self._lost_ms = max(self._lost_ms - trial.loss_ms + (0.0 if has_drafted else trial.drafter_ms), 0.0)
        if retry is None or not (has_drafted or trial.is_of_time):
            return
        if is_success:
            retry.interval_steps = FIRST_INTERVAL_STEPS
            retry.due_step = self._next_step = 0
            self._pause_steps = 1
        else:
            self._pause_steps = min(2 * self._pause_steps, MAX_PAUSE_STEPS)
            retry.interval_steps = min(2 * retry.interval_steps, MAX_INTERVAL_STEPS)
            retry.due_step += retry.interval_steps // 2

    def forget(self, key: str) -> None:
        self._retries.pop(key, None)
        self._in_flight.pop(key, None)
