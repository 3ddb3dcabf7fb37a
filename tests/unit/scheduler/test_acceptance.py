"""Estimates of acceptance against drafters whose law is known."""

import random

import pytest

from paceline.scheduler import acceptance
from paceline.scheduler.acceptance import Acceptance


def observed(hazards: list[float], num_steps: int = 400, num_drafts: int = 5) -> list[float]:
    """Survival as estimated for a request whose draft at each position stands with the given probability, averaged over late steps."""
    rng = random.Random(3)
    estimates = Acceptance()
    sums = [0.0] * num_drafts
    for step in range(num_steps):
        accepted = 0
        while accepted < num_drafts and rng.random() < hazards[accepted]:
            accepted += 1
        estimates.observe("a", num_drafts, num_drafts, accepted)
        if step >= num_steps // 2:
            sums = [total + alive for total, alive in zip(sums, estimates.survival("a", num_drafts), strict=True)]
    return [total / (num_steps - num_steps // 2) for total in sums]


def check_law() -> None:
    assert observed([0.7] * 5)[:3] == pytest.approx([0.7, 0.49, 0.343], abs=0.08)
    sharp = observed([0.95, 0.9, 0.02, 0.9, 0.9])
    assert sharp[:2] == pytest.approx([0.95, 0.855], abs=0.12)
    assert sharp[2] < 0.15
    assert observed([0.0] * 5)[0] < 0.05


def test_the_law_of_a_drafter_is_recovered() -> None:
    check_law()


def test_planted_means_in_place_of_hazards_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def means(self: acceptance._Counts, num_drafted: int, num_accepted: int) -> None:
        while len(self.num_judged) < num_drafted:
            self.num_judged.append(0.0)
            self.num_accepted.append(0.0)
        for position in range(num_drafted):
            self.num_judged[position] = self.num_judged[position] * self.memory + 1
            self.num_accepted[position] = self.num_accepted[position] * self.memory + num_accepted / num_drafted

    monkeypatch.setattr(acceptance._Counts, "observe", means)
    with pytest.raises(AssertionError):
        check_law()


def test_a_position_that_was_never_reached_teaches_nothing() -> None:
    estimates = Acceptance()
    before = estimates.survival("a", 3)
    for _ in range(30):
        estimates.observe("a", 1, 1, 1)
        estimates.observe("b", 5, 0, 0)
    after = estimates.survival("a", 3)
    assert after[0] > before[0]
    assert after[2] / after[1] == pytest.approx(after[1] / after[0], rel=0.05), "one level for all that was not judged"
    assert estimates.propensity("b") < 0.1
    assert estimates.propensity("c") == 1


def test_new_requests_are_judged_by_the_drafters_record_and_then_by_their_own() -> None:
    estimates = Acceptance()
    assert 0.5 < estimates.survival("new", 1)[0] < 0.9, "worth a try"
    for i in range(40):
        estimates.observe(f"bad{i}", 5, 5, 0)
        estimates.forget(f"bad{i}")
    assert estimates.survival("new", 1)[0] < 0.15
    for _ in range(10):
        estimates.observe("new", 1, 1, 1)
    assert estimates.survival("new", 1)[0] > 0.6
    assert estimates.survival("other", 1)[0] < 0.4


def test_a_collapse_is_told_from_a_drafter_that_is_bad_everywhere() -> None:
    collapsing, bad = Acceptance(), Acceptance()
    for _ in range(12):
        collapsing.observe("a", 5, 5, 2)
        bad.observe("a", 5, 5, 0)
    assert collapsing.collapsed_position() == 2
    assert bad.collapsed_position() is None
