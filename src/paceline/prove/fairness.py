"""Reasons why a comparison is not fair and its figures must not be used: INVALID. Asked by `verdict.py` before anything else.

Each check looks at what was recorded and gives a sentence with the numbers and the remedy, or None.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.prove.judgement import JudgeOptions
from paceline.prove.pairing import Comparison, Pair
from paceline.prove.plain_text import check_text
from paceline.prove.plan import Measurement, ServerFacts
from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord

MAX_LENGTH_DIFFERENCE = 0.10  # of mean output lengths
MAX_CACHE_DIFFERENCE = 0.02  # of the prompt tokens: more served from a cache in one arm than in the other
MAX_COUNTER_DIFFERENCE = 0.01
MIN_COUNT = 100  # counts below this may differ by more than a hundredth through a single step
MAX_RANDOM_SHARE = 0.10

_ACCEPTED_COUNTER = "vllm:spec_decode_num_accepted_tokens_total"
_DRAFTED_COUNTER = "vllm:spec_decode_num_draft_tokens_total"
_STEPS_COUNTER = "vllm:spec_decode_num_drafts_total"
_TOKENS_COUNTER = "vllm:generation_tokens_total"


def unfair_reasons(measurement: Measurement, comparisons: Sequence[Comparison], options: JudgeOptions) -> tuple[str, ...]:
    """Every reason that applies, each as a whole sentence; none: the comparison is fair."""
    records = [record for record in measurement.records if record.phase is Phase.MEASURE]
    runs = [run for run in measurement.runs if run.phase is Phase.MEASURE]
    found: list[str | None] = [
        _random_prompts(options),
        _too_many_errors(records, options.max_error_rate),
        _different_precision(measurement.servers),
        _disagreeing_chunks(records),
        _disagreeing_steps(records),
    ]
    for comparison in comparisons:
        pairs = [pair for block in comparison.blocks for pair in block.pairs]
        found += [check(comparison.concurrency, pairs) for check in (_unequal_limits, _unequal_lengths, _unequal_caches)]
    found += [_disagreeing_counters(records, runs, *counter) for counter in _COUNTERS]
    return tuple(reason for reason in found if reason is not None)


def _random_prompts(options: JudgeOptions) -> str | None:
    check = check_text(options.prompts)
    if check.random_share <= MAX_RANDOM_SHARE and not check.random_categories:
        return None
    where = f" (categories: {', '.join(check.random_categories)})" if check.random_categories else ""
    return (
        f"the prompts look like random tokens: {check.random_share:.0%} of their words stand where hardly a word repeats{where}. "
        "Speculation is overstated on such prompts; measure with text"
    )


def _too_many_errors(records: Sequence[RequestRecord], max_error_rate: float) -> str | None:
    for arm in Arm:
        mine = [record for record in records if record.arm is arm]
        failed = [record for record in mine if record.error is not None]
        if mine and len(failed) > max_error_rate * len(mine):
            return (
                f"{len(failed)} of {len(mine)} requests of the {arm} arm failed, limit {max_error_rate:.1%}; "
                f"the first said: {failed[0].error}. What is left is not the same work in both arms"
            )
    return None


def _different_precision(servers: Mapping[Arm, ServerFacts]) -> str | None:
    if len(servers) < 2:
        return None
    base, other = (servers[arm] for arm in Arm)
    told = [("dtype", base.dtype, other.dtype)]
    told += [(name, _fact(base, name), _fact(other, name)) for name in ("quantization", "kv_cache_dtype")]
    for name, first, second in told:
        if first is not None and second is not None and first != second:
            return (
                f"the two servers differ in {name}: {first} (baseline) and {second} (speculative). "
                "That is another model, not a faster decoding; serve both alike"
            )
    return None


def _fact(server: ServerFacts, name: str) -> str | None:
    value = server.facts.get(name)
    return value if isinstance(value, str) else None


def _unequal_limits(concurrency: int, pairs: Sequence[Pair]) -> str | None:
    unequal = [(base.max_tokens, other.max_tokens) for base, other in pairs if base.max_tokens != other.max_tokens]
    if not unequal:
        return None
    return (
        f"at concurrency {concurrency}, {len(unequal)} of {len(pairs)} requests asked the arms for different max_tokens "
        f"(such as {unequal[0][0]} and {unequal[0][1]}); ask both for the same"
    )


def _unequal_lengths(concurrency: int, pairs: Sequence[Pair]) -> str | None:
    base, other = (sum(pair[side].num_output_tokens for pair in pairs) for side in (0, 1))
    if not pairs or abs(base - other) <= MAX_LENGTH_DIFFERENCE * min(base, other):
        return None
    return (
        f"at concurrency {concurrency}, answers have {base / len(pairs):.1f} tokens in the baseline and {other / len(pairs):.1f} in the "
        f"speculative arm, more than {MAX_LENGTH_DIFFERENCE:.0%} apart: that is not the same work. Ask at temperature 0, or with ignore_eos"
    )


def _unequal_caches(concurrency: int, pairs: Sequence[Pair]) -> str | None:
    base, other = (sum(pair[side].num_cached_tokens for pair in pairs) for side in (0, 1))
    num_prompt_tokens = max(sum(pair[side].num_prompt_tokens for pair in pairs) for side in (0, 1))
    if abs(base - other) <= MAX_CACHE_DIFFERENCE * num_prompt_tokens:
        return None
    return (
        f"at concurrency {concurrency}, {base:,} prompt tokens of the baseline came from a cache and {other:,} of the speculative arm, of "
        f"{num_prompt_tokens:,}: a warm cache against a cold one. Salt the cache per arm, or start the server without prefix caching"
    )


def _disagreeing_chunks(records: Sequence[RequestRecord]) -> str | None:
    """Tokens in chunks against the usage at the end, where the server counts per chunk."""
    counted = [record for record in records if record.error is None and record.chunk_tokens]
    in_chunks, in_usage = sum(sum(record.chunk_tokens) for record in counted), sum(record.num_output_tokens for record in counted)
    return _disagreement("tokens in the chunks", in_chunks, "tokens in usage", in_usage)


def _disagreeing_steps(records: Sequence[RequestRecord]) -> str | None:
    """Steps and accepted drafts as the server counts them against the tokens that came; the last step of an answer may be cut by one."""
    told = [record for record in records if record.error is None and record.acceptance is not None and record.num_output_tokens]
    low = high = 0
    for record in told:
        counts = record.acceptance
        assert counts is not None
        low += counts.num_spec_steps + counts.num_accepted_draft_tokens + (counts.num_plain_steps or 0)
        high += counts.num_control_steps or 0  # whether plain steps hold them, servers differ
    num_tokens = sum(record.num_output_tokens - 1 for record in told)
    slack = max(MAX_COUNTER_DIFFERENCE * num_tokens, len(told), MAX_COUNTER_DIFFERENCE * MIN_COUNT)
    is_complete = all(record.acceptance is not None and record.acceptance.num_plain_steps is not None for record in told)
    if low <= num_tokens + slack and (not is_complete or num_tokens <= low + high + slack):
        return None
    return (
        f"steps and accepted drafts make {low:,} tokens by the server's account, but {num_tokens:,} came after the first ones: "
        "its counts of drafts are wrong, and no acceptance length can be given"
    )


def _accepted(record: RequestRecord) -> int:
    return record.acceptance.num_accepted_draft_tokens if record.acceptance else 0


def _drafted(record: RequestRecord) -> int:
    return record.acceptance.num_draft_tokens if record.acceptance else 0


def _steps(record: RequestRecord) -> int:
    return record.acceptance.num_spec_steps if record.acceptance else 0


def _tokens(record: RequestRecord) -> int:
    return record.num_output_tokens


_COUNTERS: tuple[tuple[str, Callable[[RequestRecord], int], bool], ...] = (
    (_STEPS_COUNTER, _steps, True),
    (_DRAFTED_COUNTER, _drafted, True),
    (_ACCEPTED_COUNTER, _accepted, True),
    (_TOKENS_COUNTER, _tokens, False),
)


def _disagreeing_counters(
    records: Sequence[RequestRecord],
    runs: Iterable[BlockRun],
    counter: str,
    of_record: Callable[[RequestRecord], int],
    needs_acceptance: bool,
) -> str | None:
    """The requests' own accounts against the server's counter, over all blocks in which every request was whole and told its own."""
    requests: dict[tuple[Arm, int, int], list[RequestRecord]] = defaultdict(list)
    for record in records:
        requests[record.arm, record.concurrency, record.block].append(record)
    by_requests = by_server = 0.0
    for run in runs:
        mine = requests[run.arm, run.concurrency, run.block]
        is_told = all(record.error is None and (record.acceptance is not None or not needs_acceptance) for record in mine)
        if mine and is_told and counter in run.counters_before and counter in run.counters_after:
            by_requests += sum(of_record(record) for record in mine)
            by_server += run.counters_after[counter] - run.counters_before[counter]
    return _disagreement(f"{counter} of the requests themselves", by_requests, "of /metrics", by_server)


def _disagreement(first_name: str, first: float, second_name: str, second: float) -> str | None:
    if abs(first - second) <= MAX_COUNTER_DIFFERENCE * max(first, second, MIN_COUNT):
        return None
    return (
        f"two counts of one thing are more than {MAX_COUNTER_DIFFERENCE:.0%} apart: {first_name} {first:,.0f}, {second_name} "
        f"{second:,.0f}. Is somebody else using the server, or is something between it and this client?"
    )
