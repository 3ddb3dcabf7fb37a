"""Kinds of decode steps, and what they took when they were measured. Made by `profile.py`, kept on disk by `cost_cache.py`. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.facts import DrafterCost, StepCosts, TargetCost


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of decode step: drafts and context are per row."""

    num_rows: int
    num_drafts: int
    num_context_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * (self.num_drafts + 1)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What steps of one kind took."""

    kind: Kind
    num_tokens: int  # all rows together: a drafter may propose less than it was asked for
    target_ms: float
    drafter_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a model on a machine, after `num_rounds` starts that had time to measure."""

    measurements: tuple[Measurement, ...] = ()
    num_rounds: int = 0

    def missing(self, kinds: Iterable[Kind]) -> list[Kind]:
        """Those of `kinds` that have not been measured, in their order."""
        known = {measurement.kind for measurement in self.measurements}
        return [kind for kind in kinds if kind not in known]

    def find(self, kind: Kind) -> Measurement | None:
        return next((measurement for measurement in self.measurements if measurement.kind == kind), None)

    def costs(self) -> StepCosts:
        """The same as the scheduler wants it: the target by all tokens of a step, the drafter by drafts of each row."""
        target: list[TargetCost] = []
        drafter: list[DrafterCost] = []
        for done in self.measurements:
            target.append(TargetCost(done.kind.num_rows, done.num_tokens, done.kind.num_context_tokens, done.target_ms))
            num_drafts = done.num_tokens // done.kind.num_rows - 1
            if num_drafts:
                drafter.append(DrafterCost(done.kind.num_rows, num_drafts, done.drafter_ms))
        return StepCosts(tuple(target), tuple(drafter))
