"""What the guard reports upward: its state and draft length by range of batches, and how often and why drafting was switched off."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.stats import GuardState, SwitchOff

_log = logging.getLogger(__name__)

_MEMORY = 0.95  # weight of a step's mean draft length after each newer step

_EXPLANATIONS: Mapping[SwitchOff, str] = {
    SwitchOff.ACCEPTANCE: "too few drafts are accepted",
    SwitchOff.DRAFTER_TIME: "drafts are accepted, but drafting and verifying them takes too long",
    SwitchOff.ROW: "a request of the batch would be slowed down for the others",
    SwitchOff.POSITION: "drafts beyond a position are no longer accepted; shorter ones go on",
    SwitchOff.ACCOUNT: "what may be lost against plain decoding is spent",
}


@dataclass(frozen=True, slots=True)
class DraftReport:
    """Fields of EngineStats."""

    states: dict[str, GuardState]
    lengths: dict[str, float]
    num_switch_offs: dict[str, int]


class DraftRecord:
    """Kept by the policy, one call per planned step."""

    def __init__(self) -> None:
        self._states: dict[str, GuardState] = {}
        self._lengths: dict[str, float] = {}
        self._num_switch_offs: dict[str, int] = {}
        self._drafting: set[str] = set()  # bands whose last decision was to draft

    def is_drafting(self, band: str) -> bool:
        """Whether the last decision about a band was to draft; measuring and trials decide nothing."""
        return band in self._drafting

    def note(self, band: str, state: GuardState, mean_length: float) -> None:
        """The state of a planned step, and its drafts per row that may draft."""
        self._states[band] = state
        before = self._lengths.get(band)
        self._lengths[band] = mean_length if before is None else _MEMORY * before + (1 - _MEMORY) * mean_length
        if state is GuardState.DRAFTING:
            self._drafting.add(band)

    def switch_off(self, band: str, reason: SwitchOff) -> None:
        """Counts the end of drafting in a band; the log has the 1st, 2nd, 4th, 8th ... of each reason."""
        self._drafting.discard(band)
        self.count(band, reason)

    def count(self, band: str, reason: SwitchOff) -> None:
        """Counts an event after which drafting may go on."""
        number = self._num_switch_offs.get(reason.value, 0) + 1
        self._num_switch_offs[reason.value] = number
        if number & (number - 1) == 0:
            _log.info("speculation cut at %s: %s (%d times for this reason)", band, _EXPLANATIONS[reason], number)

    def report(self) -> DraftReport:
        """A copy of now."""
        return DraftReport(dict(self._states), dict(self._lengths), dict(self._num_switch_offs))
