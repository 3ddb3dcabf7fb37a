"""Acceptance over many answers, from the server's own counts and never from chunks. For `summary.py` and `fairness.py`.

The first token of an answer comes from the prompt's pass and is no verification, so it enters no figure here.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from paceline.prove.record import Acceptance, RequestRecord
from paceline.prove.results import AcceptanceLength
from paceline.prove.statistics.student import Floats


def acceptance_length(records: Sequence[RequestRecord]) -> AcceptanceLength | None:
    """Tokens per verification in both poolings; None where no verification was counted."""
    told = [record.acceptance for record in records if record.acceptance is not None and record.acceptance.num_spec_steps > 0]
    if not told:
        return None
    means = [1 + each.num_accepted_draft_tokens / each.num_spec_steps for each in told]
    num_steps = sum(each.num_spec_steps for each in told)
    num_accepted = sum(each.num_accepted_draft_tokens for each in told)
    return AcceptanceLength(sum(means) / len(means), 1 + num_accepted / num_steps)


def conditional_acceptance(records: Sequence[RequestRecord]) -> tuple[float, ...]:
    """P(draft i accepted | it was made and those before it accepted), from draft 1 on, as long as any was made.

    A step that drafted i - 1 tokens and had them all accepted says nothing of draft i: it leaves the denominator (as Kaplan and Meier
    estimate). Which steps these are is known where the server counts by draft length. Else the lengths of a request's drafts are taken as
    close to their mean as whole numbers allow, which is exact if all were the same. Where a step accepted more than that, they are taken
    as widely spread as their mean allows (the law of most entropy): a position must not look perfect because nobody counted its misses.
    """
    accepted: list[float] = []
    at_risk: list[float] = []
    for record in records:
        if record.acceptance is not None:
            for mean_length, histogram in _by_length(record.acceptance):
                _add_position_counts(histogram, _shares_drafted(mean_length, histogram), accepted, at_risk)
    rates: list[float] = []
    for num_accepted, num_at_risk in zip(accepted, at_risk, strict=True):
        if num_at_risk <= 0:
            break
        rates.append(num_accepted / num_at_risk)
    return tuple(rates)


def joint_acceptance(conditional: Sequence[float]) -> tuple[float, ...]:
    """P(drafts 1 to i all accepted), if all are made."""
    return tuple(accumulate(conditional, lambda a, b: a * b))


def _by_length(told: Acceptance) -> list[tuple[float, tuple[int, ...]]]:
    """(Drafts per step, histogram of accepted drafts) of groups of steps."""
    if told.histograms_by_draft_length:
        return [(float(length), histogram) for length, histogram in told.histograms_by_draft_length]
    if not told.histogram or not told.num_spec_steps:
        return []
    return [(told.num_draft_tokens / told.num_spec_steps, told.histogram)]


def _shares_drafted(mean_length: float, histogram: tuple[int, ...]) -> list[float]:
    """For each position from 1 on: of the steps that drafted up to the one before it, the share that drafted it as well."""
    most_accepted = max((index for index, count in enumerate(histogram) if count), default=0)
    longest = len(histogram) - 1
    if most_accepted <= math.ceil(mean_length) or mean_length >= longest:
        return [min(max(mean_length - position, 0.0), 1.0) for position in range(longest)]
    return list(_shares_of_most_entropy(mean_length, longest))


@lru_cache(maxsize=4096)
def _shares_of_most_entropy(mean: float, longest: int) -> tuple[float, ...]:
    """P(length >= i | length >= i - 1), i = 1.. `longest`, for lengths of at least 1 whose probabilities are in a geometric series."""
    lengths = np.arange(1, longest + 1, dtype=np.float64)
    low, high = -50.0, 50.0  # of the logarithm of the series' factor
    for _ in range(60):
        middle = (low + high) / 2
        weights = _geometric(middle, lengths)
        low, high = (middle, high) if (weights * lengths).sum() < mean * weights.sum() else (low, middle)
    reaching: list[float] = np.cumsum(_geometric(low, lengths)[::-1])[::-1].tolist()
    return (1.0, *(after / before if before > 0 else 0.0 for before, after in pairwise(reaching)))


def _geometric(log_factor: float, lengths: Floats) -> Floats:
    """Weights of the series; the largest is 1."""
    exponents = log_factor * lengths
    return np.exp(exponents - exponents.max())


def _add_position_counts(histogram: tuple[int, ...], shares: list[float], accepted: list[float], at_risk: list[float]) -> None:
    num_reaching = [*accumulate(reversed(histogram))][::-1]  # index i: steps with at least i accepted
    for position in range(1, len(histogram)):
        if len(accepted) < position:
            accepted.append(0.0)
            at_risk.append(0.0)
        accepted[position - 1] += num_reaching[position]
        at_risk[position - 1] += max(num_reaching[position], num_reaching[position - 1] * shares[position - 1])
