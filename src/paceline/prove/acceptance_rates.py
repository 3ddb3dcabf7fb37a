"""Acceptance over many answers, from the server's own counts and never from chunks. For `summary.py` and `fairness.py`.

The first token of an answer comes from the prompt's pass and is no verification, so it enters no figure here.
"""

from collections.abc import Sequence
from itertools import accumulate

from paceline.prove.record import Acceptance, RequestRecord
from paceline.prove.results import AcceptanceLength


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
    estimate). Which steps these are is known where the server counts by draft length or every step drafted the same number; else lengths
    are taken as close to the request's mean as whole numbers allow.
    """
    accepted: list[float] = []
    at_risk: list[float] = []
    for record in records:
        if record.acceptance is not None:
            for length, histogram in _by_length(record.acceptance):
                _add_position_counts(length, histogram, accepted, at_risk)
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


def _add_position_counts(mean_length: float, histogram: tuple[int, ...], accepted: list[float], at_risk: list[float]) -> None:
    num_reaching = [*accumulate(reversed(histogram))][::-1]  # index i: steps with at least i accepted
    for position in range(1, len(histogram)):
        if len(accepted) < position:
            accepted.append(0.0)
            at_risk.append(0.0)
        share_drafted = min(max(mean_length - (position - 1), 0.0), 1.0)
        accepted[position - 1] += num_reaching[position]
        at_risk[position - 1] += max(num_reaching[position], num_reaching[position - 1] * share_drafted)
