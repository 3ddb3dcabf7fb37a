"""Drafters that are out to make speculation lose: good until they are trusted, then bad; slow by turns; anything by random phases."""

import random
from dataclasses import dataclass

from tests.fakes.drafting_world import Drafter


@dataclass
class TrustBreaker(Drafter):
    """Everything stands until the batch was allowed `trust` drafts per step so often; then nothing does until it is hardly allowed any."""

    trust: int
    num_good_steps: int
    patience: int  # bad steps, at most
    num_rows: int
    is_good: bool = True
    count: int = 0

    def draft(self, row: int, num_allotted: int, rng: random.Random) -> tuple[int, int]:
        return num_allotted, num_allotted if self.is_good else 0

    def end_step(self, num_allotted: int) -> None:
        is_trusted = num_allotted >= self.trust * self.num_rows
        if self.is_good:
            self.count += is_trusted
            if self.count >= self.num_good_steps:
                self.is_good, self.count = False, 0
        else:
            self.count += 1
            if self.count >= self.patience:
                self.is_good, self.count = True, 0


@dataclass
class RandomPhases(Drafter):
    """Acceptance, eagerness and time per draft change at random."""

    rng: random.Random
    change: float = 0.05
    acceptance: float = 0.9
    propensity: float = 1.0
    collapse: int = 99
    ms: float = 0.2

    def draft(self, row: int, num_allotted: int, rng: random.Random) -> tuple[int, int]:
        if num_allotted == 0 or rng.random() >= self.propensity:
            return 0, 0
        accepted = 0
        while accepted < min(num_allotted, self.collapse) and rng.random() < self.acceptance:
            accepted += 1
        return num_allotted, accepted

    def propose_ms(self, longest: int) -> float:
        return self.ms if longest else 0.0

    def end_step(self, num_allotted: int) -> None:
        rng = self.rng
        if rng.random() < self.change:
            self.acceptance = rng.choice((0.0, 0.0, 0.3, 0.6, 1.0))
            self.propensity = rng.choice((1.0, 1.0, 0.5, 0.1))
            self.collapse = rng.choice((99, 99, 1, 2))
            self.ms = rng.choice((0.2, 0.2, 5.0, 20.0))


def random_adversary(rng: random.Random, num_rows: int) -> Drafter:
    if rng.random() < 0.5:
        return TrustBreaker(rng.randint(1, 4), rng.randint(1, 12), rng.randint(2, 40), num_rows)
    return RandomPhases(rng, rng.choice((0.02, 0.1, 0.3)))
