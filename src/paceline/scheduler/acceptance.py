"""How likely drafts are to stand, by position, from those that were judged. The draft length policy asks here for survival probabilities.

A position is judged only if all before it were accepted, so what is estimated are hazards: of the drafts judged at a position, the
share that stood (the Kaplan-Meier estimator of survival). A position that no draft reached teaches nothing.
"""

from dataclasses import dataclass, field

_REQUEST_MEMORY = 0.85  # weight of an observation after each newer one at its position: text changes within an answer
_DRAFTER_MEMORY = 0.98
_FIRST_GUESS = 0.7  # acceptance of a drafter that nothing is known of: worth a try
_FIRST_GUESS_TRIALS = 4.0  # judged drafts that weigh as much as the guess
_DRAFTER_TRIALS = 3.0  # of a request, that weigh as much as the drafter's record with all requests
_POSITION_TRIALS = 2.0  # at a position, that weigh as much as the request's other positions
_HIGHEST = 0.98
_LEAST_PROPENSITY = 0.02  # a text may begin to repeat itself at any time: to ask a cheap drafter stays worth it
_COLLAPSE_TRIALS = 5.0
_COLLAPSE_SHARE = 0.1
_SOUND_SHARE = 0.3


@dataclass(slots=True)
class _Counts:
    """Judged and accepted drafts by position, older ones weighing less."""

    memory: float
    num_judged: list[float] = field(default_factory=list[float])
    num_accepted: list[float] = field(default_factory=list[float])

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        num_reached = min(num_accepted + 1, num_drafted)
        while len(self.num_judged) < num_reached:
            self.num_judged.append(0.0)
            self.num_accepted.append(0.0)
        for position in range(num_reached):
            self.num_judged[position] = self.num_judged[position] * self.memory + 1
            self.num_accepted[position] = self.num_accepted[position] * self.memory + (position < num_accepted)

    def pooled(self, guess: float, num_trials: float) -> float:
        """The share accepted over all positions, where `guess` weighs as much as `num_trials` judged drafts."""
        return (sum(self.num_accepted) + num_trials * guess) / (sum(self.num_judged) + num_trials)

    def at(self, position: int, guess: float, num_trials: float) -> float:
        """The hazard's complement at one position, with a guess as in `pooled`."""
        if position >= len(self.num_judged):
            return guess
        return (self.num_accepted[position] + num_trials * guess) / (self.num_judged[position] + num_trials)


@dataclass(slots=True)
class _RequestRecord:
    counts: _Counts = field(default_factory=lambda: _Counts(_REQUEST_MEMORY))
    propensity: float | None = None  # None until the drafter was first asked
    survival: list[float] = field(default_factory=list[float])  # as last computed
    version: int = -1  # of the drafter's record at that time


class Acceptance:
    """The drafter's record with all requests, and each request's own on top of it."""

    def __init__(self) -> None:
        self._drafter = _Counts(_DRAFTER_MEMORY)
        self._requests: dict[str, _RequestRecord] = {}
        self.version = 0  # grows with every judged draft

    def observe(self, request_id: str, num_allotted: int, num_drafted: int, num_accepted: int) -> None:
        """Learns from one committed step of a row that was allowed `num_allotted` drafts."""
        if num_allotted == 0:
            return
        record = self._record(request_id)
        did_draft = 1.0 if num_drafted else 0.0
        record.propensity = did_draft if record.propensity is None else 0.9 * record.propensity + 0.1 * did_draft
        if num_drafted:
            record.counts.observe(num_drafted, num_accepted)
            self._drafter.observe(num_drafted, num_accepted)
            self.version += 1

    def forget(self, request_id: str) -> None:
        """Drops the record of a request that ended; the drafter's keeps what it taught."""
        self._requests.pop(request_id, None)

    def propensity(self, request_id: str) -> float:
        """How often the drafter drafts for this request when it may; 1 for a request that it was never asked for."""
        record = self._requests.get(request_id)
        return 1.0 if record is None or record.propensity is None else max(record.propensity, _LEAST_PROPENSITY)

    def survival(self, request_id: str, num_positions: int) -> list[float]:
        """For each of the first positions, the probability that a draft there and all before it are accepted."""
        record = self._record(request_id)
        if record.version != self.version or len(record.survival) < num_positions:
            record.survival = self._survival(record.counts, num_positions)
            record.version = self.version
        return record.survival[:num_positions]

    def _survival(self, counts: _Counts, num_positions: int) -> list[float]:
        drafter = self._drafter
        overall = drafter.pooled(_FIRST_GUESS, _FIRST_GUESS_TRIALS)
        own = counts.pooled(overall, _DRAFTER_TRIALS)
        survival: list[float] = []
        alive = 1.0
        for position in range(num_positions):
            # The request's own level, with the drafter's profile over positions.
            guess = min(own * drafter.at(position, overall, _POSITION_TRIALS) / overall, _HIGHEST)
            alive *= min(counts.at(position, guess, _POSITION_TRIALS), _HIGHEST)
            survival.append(alive)
        return survival

    def _record(self, request_id: str) -> _RequestRecord:
        record = self._requests.get(request_id)
        if record is None:
            record = self._requests[request_id] = _RequestRecord()
        return record

    def collapsed_position(self) -> int | None:
        """The first position at which hardly any draft stands although those before it are sound; None if there is none."""
        judged, accepted = self._drafter.num_judged, self._drafter.num_accepted
        for position in range(1, len(judged)):
            is_sound = accepted[position - 1] >= _SOUND_SHARE * judged[position - 1]
            if is_sound and judged[position] >= _COLLAPSE_TRIALS and accepted[position] < _COLLAPSE_SHARE * judged[position]:
                return position
        return None
