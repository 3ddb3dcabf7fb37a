"""The estimator on triples with a known truth: coverage of its interval, bounds on memory and work."""

import time

import numpy as np
import pytest

from paceline.scheduler.bands import rows_band, rows_context_band
from paceline.scheduler.speedup import MAX_TRIPLES, MIN_TRIPLES, SpeedupEstimator, Triple, speedup

BAND = "rows=1,context=0-1k"


def made_triples(random: np.random.Generator, num_triples: int, ratio: float, kind: str) -> tuple[Triple, ...]:
    """As a row of speed-up `ratio` yields them; `kind` of noise: `plain`, `drift` (AR(1) from triple to triple), `stalls`, `texts`."""
    num_tokens = 20 * random.binomial(64, 0.35, num_triples)  # 448 on average, for 320 plain ones
    if kind == "texts":  # some are easier to draft than others
        num_tokens = num_tokens * random.choice((3, 7), num_triples) // 5
    times = np.exp(random.normal(0, 0.1, (num_triples, 2)))
    if kind == "drift":
        level = 0.0
        for i in range(num_triples):
            level = 0.8 * level + random.normal(0, 0.1)
            times[i] *= np.exp(level)
    if kind == "stalls":
        times *= np.where(random.random((num_triples, 2)) < 0.1, 1.5, 1.0)
    speculative_row_s, control_row_s = 3.2 * 448 / 320 / ratio * times[:, 0], 3.2 * times[:, 1]
    rows = zip(num_tokens, speculative_row_s, control_row_s, strict=True)
    return tuple(Triple(BAND, int(tokens), float(speculative_s), 320, float(control_s)) for tokens, speculative_s, control_s in rows)


@pytest.mark.parametrize("kind", ["plain", "drift", "stalls", "texts"])
def test_the_interval_holds_the_truth_in_95_of_100_runs(kind: str) -> None:
    random = np.random.default_rng(1)
    num_runs, ratio, num_held = 400, 1.3, 0
    log_ratios: list[float] = []
    for _ in range(num_runs):
        found = speedup(BAND, made_triples(random, MIN_TRIPLES + 10, ratio, kind), random)
        num_held += found.low < ratio < found.high
        log_ratios.append(np.log(found.ratio / ratio))
    assert 0.925 <= num_held / num_runs <= 0.975, f"95 % give or take 2.3 standard errors of {num_runs} runs"
    assert abs(np.mean(log_ratios)) < 0.01


def test_a_mean_of_ratios_would_gain_from_stalls_and_the_ratio_of_sums_does_not() -> None:
    triples = made_triples(np.random.default_rng(0), 20_000, 1.0, "stalls")
    rates = [(t.num_speculative_tokens / t.speculative_row_s) / (t.num_control_tokens / t.control_row_s) for t in triples]
    assert np.mean(rates) > 1.02
    assert speedup(BAND, triples[:4000], np.random.default_rng(0)).ratio == pytest.approx(1.0, abs=0.01)


def test_nothing_is_published_below_the_least_number_and_old_triples_leave() -> None:
    estimator = SpeedupEstimator()
    random = np.random.default_rng(0)
    for triple in made_triples(random, MIN_TRIPLES - 1, 2.0, "plain"):
        estimator.add(triple)
        assert estimator.speedups() == ()
    estimator.add(made_triples(random, 1, 2.0, "plain")[0])
    (first,) = estimator.speedups()
    assert (first.band, first.num_triples) == (BAND, MIN_TRIPLES)
    assert first.low < first.ratio < first.high
    assert first.ratio == pytest.approx(2.0, rel=0.1)
    for triple in made_triples(random, MAX_TRIPLES, 1.0, "plain"):
        estimator.add(triple)
    (last,) = estimator.speedups()
    assert last.num_triples == MAX_TRIPLES
    assert last.ratio == pytest.approx(1.0, rel=0.1), "the older ones of 2.0 are gone"


def test_a_call_makes_one_interval_anew_and_none_without_new_triples() -> None:
    estimator = SpeedupEstimator()
    triples = made_triples(np.random.default_rng(0), MIN_TRIPLES, 1.5, "plain")
    for band in ("a", "b"):
        for triple in triples:
            estimator.add(Triple(band, *(getattr(triple, name) for name in Triple.__slots__[1:])))
    assert [each.band for each in estimator.speedups()] == ["a"]
    both = estimator.speedups()
    assert [each.band for each in both] == ["a", "b"]
    assert estimator.speedups() == both, "an interval made anew would differ a little"
    started_s = time.perf_counter()
    for _ in range(1000):
        estimator.speedups()
    assert time.perf_counter() - started_s < 1


def test_bands_hold_their_upper_bound() -> None:
    assert [rows_band(num) for num in (1, 2, 3, 4, 5, 8, 9, 128, 129, 4096)] == [
        f"rows={name}" for name in ("1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "65-128", "129+", "129+")
    ]
    assert rows_context_band(2, 2 * 1024) == "rows=2,context=0-1k"
    assert rows_context_band(2.5, 2.5 * 1025) == "rows=3-4,context=1k-4k"
    assert rows_context_band(1, 1 << 20) == "rows=1,context=16k+"
