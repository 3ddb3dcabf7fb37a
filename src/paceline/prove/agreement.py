"""Whether a server's three accounts of its drafts agree: per request, by the lengths of chunks, and in its Prometheus counters.

Acceptance that cannot be cross-checked is a claim. Called by the verdict, which decides what a disagreement means.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.prove.counters import GENERATION_COUNTERS, NUM_ACCEPTED_TOKENS, NUM_DRAFT_TOKENS, NUM_DRAFTS
from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord

TOLERANCE = 0.01
MIN_COUNT = 100  # counts below this may differ by more than a hundredth through a single step


class Account(StrEnum):
    """What does not agree with the account per request."""

    BASELINE = "baseline"  # it has drafts, and is none
    CHUNKS = "chunks"
    COUNTERS = "counters"
    TRAFFIC = "traffic"  # the server made other tokens than those that came here: somebody else used it


@dataclass(frozen=True, slots=True)
class Disagreement:
    account: Account
    text: str


@dataclass(frozen=True, slots=True)
class DifferentAnswer:
    """One question that the arms answered differently, or at different length."""

    question_id: str
    turn: int
    concurrency: int
    block: int
    num_tokens: tuple[int, int]  # baseline, speculative
    num_same_chars: int  # before the first difference


def acceptance_disagreements(records: Sequence[RequestRecord], runs: Iterable[BlockRun]) -> tuple[Disagreement, ...]:
    """Everything beyond 1 % among the measured records; empty if all that can be compared agrees."""
    measured = [record for record in records if record.phase is Phase.MEASURE]
    found = [*_drafts_in_baseline(measured), *_chunk_lengths(measured)]
    whole_runs = _whole_runs(measured, runs)
    for arm in Arm:
        of_arm = [(run, of_run) for run, of_run in whole_runs if run.arm is arm]
        found += _counters(arm, of_arm)
        found += _traffic(arm, of_arm)
    return tuple(found)


def different_answers(records: Iterable[RequestRecord]) -> tuple[DifferentAnswer, ...]:
    """Answers, whole in both arms, that are not the same. With an exact server there are none: total times are over the same tokens."""
    sides: dict[tuple[int, float, int, str, int], dict[Arm, RequestRecord]] = defaultdict(dict)
    for record in records:
        if record.phase is Phase.MEASURE and record.error is None:
            sides[record.concurrency, record.rate_per_s, record.block, record.question_id, record.turn][record.arm] = record
    found: list[DifferentAnswer] = []
    for (concurrency, _, block, question_id, turn), of_arm in sides.items():
        if len(of_arm) < 2:
            continue
        base, other = of_arm[Arm.BASELINE], of_arm[Arm.SPECULATIVE]
        counts = (base.num_output_tokens, other.num_output_tokens)
        if (base.text, counts[0], base.token_ids) != (other.text, counts[1], other.token_ids):
            found.append(DifferentAnswer(question_id, turn, concurrency, block, counts, _num_same(base.text, other.text)))
    return tuple(found)


def _num_same(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _drafts_in_baseline(records: Sequence[RequestRecord]) -> Iterable[Disagreement]:
    baseline = [record for record in records if record.arm is Arm.BASELINE]
    num_drafted = sum(record.acceptance is not None and record.acceptance.num_spec_steps > 0 for record in baseline)
    if num_drafted:
        yield Disagreement(
            Account.BASELINE,
            f"{num_drafted:,} of {len(baseline):,} answers of the baseline were decoded with drafts: it is no plain decoding; "
            "give a server without a drafter as --baseline-url",
        )


def _chunk_lengths(records: Sequence[RequestRecord]) -> Iterable[Disagreement]:
    """A step gives its accepted drafts and one more token. The last may be cut short by the answer's end, by less than its drafts."""
    num_wrong = num_tokens = 0
    for record in records:
        acceptance, chunks = record.acceptance, record.chunk_tokens
        if acceptance is None or record.error is not None or len(chunks) < 2:
            continue
        num_steps = _num_steps(acceptance, len(chunks) - 1)
        if num_steps is None:
            continue
        # Where a chunk is a step the first one is the prompt's; where chunks hold several, the prompt gave one token.
        of_steps = record.num_output_tokens - (chunks[0] if num_steps == len(chunks) - 1 else 1)
        excess = acceptance.num_accepted_draft_tokens + num_steps - of_steps
        num_cut = acceptance.num_spec_tokens or max(len(acceptance.histogram) - 1, 1)
        num_wrong += max(excess - num_cut, -excess, 0)
        num_tokens += of_steps
    if num_wrong > TOLERANCE * max(num_tokens, MIN_COUNT):
        yield Disagreement(
            Account.CHUNKS,
            f"tokens by the requests' own counts of drafts and by chunks differ by {num_wrong:,} of {num_tokens:,} "
            f"more than {TOLERANCE:.0%}: its counts of drafts are wrong, and no acceptance length can be given",
        )


def _num_steps(acceptance: Acceptance, num_chunks: int) -> int | None:
    """Decode steps of an answer: as the server says, else the chunks behind the first if that many can be; None if it cannot be known."""
    if acceptance.num_plain_steps is not None:
        return acceptance.num_spec_steps + acceptance.num_plain_steps
    return num_chunks if num_chunks >= acceptance.num_spec_steps else None


def _whole_runs(records: Sequence[RequestRecord], runs: Iterable[BlockRun]) -> list[tuple[BlockRun, list[RequestRecord]]]:
    """Measured runs in which every answer is whole, for a request that broke off takes its counts with it."""
    by_place: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        by_place[record.place].append(record)
    measured = ((run, by_place[run.place]) for run in runs if run.phase is Phase.MEASURE and run.place in by_place)
    return [(run, of_run) for run, of_run in measured if all(record.error is None for record in of_run)]


def _counters(arm: Arm, runs: Sequence[tuple[BlockRun, list[RequestRecord]]]) -> Iterable[Disagreement]:
    comparable = [
        (run, [record.acceptance for record in of_run if record.acceptance is not None])
        for run, of_run in runs
        if NUM_DRAFTS in run.counters_before and NUM_DRAFTS in run.counters_after
        if all(record.acceptance is not None for record in of_run)
    ]
    for name, field in (
        (NUM_DRAFTS, "steps with drafts"),
        (NUM_DRAFT_TOKENS, "draft tokens"),
        (NUM_ACCEPTED_TOKENS, "accepted draft tokens"),
    ):
        told = sum(_of(account, name) for _, accounts in comparable for account in accounts)
        counted = round(sum(_delta(run, name) for run, _ in comparable))
        if _differ(told, counted):
            yield Disagreement(
                Account.COUNTERS,
                f"{arm} arm: its requests tell of {told:,} {field}, the server's counters of {counted:,} "
                f"which is more than {TOLERANCE:.0%} apart: is somebody else using the server, or is one of its accounts wrong?",
            )


def _of(account: Acceptance, name: str) -> int:
    if name == NUM_DRAFTS:
        return account.num_spec_steps
    return account.num_draft_tokens if name == NUM_DRAFT_TOKENS else account.num_accepted_draft_tokens


def _traffic(arm: Arm, runs: Sequence[tuple[BlockRun, list[RequestRecord]]]) -> Iterable[Disagreement]:
    asked = counted = 0
    for run, of_run in runs:
        name = next((name for name in GENERATION_COUNTERS if name in run.counters_before and name in run.counters_after), None)
        if name is not None:
            asked += sum(record.num_output_tokens for record in of_run)
            counted += round(_delta(run, name))
    if _differ(asked, counted):
        yield Disagreement(
            Account.TRAFFIC,
            f"{arm} arm: by its counters the server made {counted:,} tokens while {asked:,} came here, more than {TOLERANCE:.0%} apart; "
            "measure while nobody else uses it",
        )


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > TOLERANCE * max(one, other, MIN_COUNT)


def _delta(run: BlockRun, name: str) -> float:
    return run.counters_after.get(name, 0.0) - run.counters_before.get(name, 0.0)
