"""Reasons why a comparison is not fair and its figures must not be used: INVALID. Asked by `verdict.py` before anything else.

Each check looks at what was recorded and gives a sentence with the numbers and the remedy, or None.
"""

from collections.abc import Mapping, Sequence

from paceline.prove.agreement import acceptance_disagreements
from paceline.prove.judgement import JudgeOptions
from paceline.prove.pairing import Comparison, Pair
from paceline.prove.plain_text import check_text
from paceline.prove.plan import Measurement, ServerFacts
from paceline.prove.record import Arm, Phase, RequestRecord

MAX_LENGTH_DIFFERENCE = 0.10  # of mean output lengths
MAX_PROMPT_DIFFERENCE = 0.01  # of the prompt tokens of requests that were given the same messages
MAX_CACHE_DIFFERENCE = 0.02  # of the prompt tokens: more served from a cache in one arm than in the other
MAX_RANDOM_SHARE = 0.10


def unfair_reasons(measurement: Measurement, comparisons: Sequence[Comparison], options: JudgeOptions) -> tuple[str, ...]:
    """Every reason that applies, each as a whole sentence; none: the comparison is fair."""
    asked = [record for record in measurement.records if record.phase in (Phase.MEASURE, Phase.SET_ASIDE)]
    found: list[str | None] = [
        _random_prompts(options),
        _too_many_errors(asked, options.max_error_rate),
        _different_precision(measurement.servers),
        _different_hardware(measurement.servers),
        _lost_recording(measurement.records, options.max_error_rate),
    ]
    for comparison in comparisons:
        pairs = [pair for block in comparison.blocks for pair in block.pairs]
        found += [check(comparison.concurrency, pairs) for check in (_unequal_limits, _unequal_prompts, _unequal_lengths, _unequal_caches)]
    found += [disagreement.text for disagreement in acceptance_disagreements(measurement.records, measurement.runs)]
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


def _lost_recording(records: Sequence[RequestRecord], max_error_rate: float) -> str | None:
    """Conversations that fail while they are recorded are not measured: too many of them, and the rest is a choice of the easy ones."""
    mine = [record for record in records if record.phase is Phase.RECORD]
    failed = [record for record in mine if record.error is not None]
    if len(failed) <= max_error_rate * len(mine):
        return None
    return (
        f"{len(failed)} of {len(mine)} requests failed while conversations were recorded, limit {max_error_rate:.1%}; "
        f"the first said: {failed[0].error}. What is left is not what was to be measured"
    )


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


def _different_hardware(servers: Mapping[Arm, ServerFacts]) -> str | None:
    numbers = {arm: facts.num_gpus for arm, facts in servers.items() if facts.num_gpus is not None}
    if len(numbers) < 2 or len(set(numbers.values())) < 2:
        return None
    base, other = (numbers[arm] for arm in Arm)
    return (
        f"the server of the baseline computes on {base:,} GPU{'s' if base > 1 else ''} and that of the speculative arm on {other:,}: "
        "more hardware is no faster decoding; serve both on as many"
    )


def unknown_precision(servers: Mapping[Arm, ServerFacts]) -> str | None:
    """What to note where two servers are compared and one does not say its dtype: it cannot be told that they serve the same model."""
    silent = [arm for arm, facts in servers.items() if facts.dtype is None]
    if not silent or len({facts.base_url for facts in servers.values()}) < 2:
        return None
    return (
        f"the precision is not known of the server of the {' and the '.join(silent)} arm, which does not say its dtype: "
        "that both servers compute alike could not be checked"
    )


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


def _unequal_prompts(concurrency: int, pairs: Sequence[Pair]) -> str | None:
    """The same messages must be the same tokens; only an arm's own answers, where nothing was replayed, may differ in later turns."""
    same = [(base, other) for base, other in pairs if base.turn == 0 or (base.is_replayed and other.is_replayed)]
    told = [(base.num_prompt_tokens, other.num_prompt_tokens) for base, other in same if base.num_prompt_tokens and other.num_prompt_tokens]
    apart = sum(abs(base - other) for base, other in told)
    if apart <= MAX_PROMPT_DIFFERENCE * sum(base for base, _ in told):
        return None
    first = next(pair for pair in told if pair[0] != pair[1])
    return (
        f"at concurrency {concurrency}, the same messages are different numbers of tokens in the arms (such as {first[0]:,} in the "
        f"baseline and {first[1]:,} in the speculative arm): another tokenizer or chat template, and other work; serve one "
        "model in both"
    )


def _unequal_lengths(concurrency: int, pairs: Sequence[Pair]) -> str | None:
    base, other = (sum(pair[side].num_output_tokens for pair in pairs) for side in (0, 1))
    if not pairs or abs(base - other) <= MAX_LENGTH_DIFFERENCE * min(base, other):
        return None
    return (
        f"at concurrency {concurrency}, answers have {base / len(pairs):.1f} tokens in the baseline and {other / len(pairs):.1f} in the "
        f"speculative arm, more than {MAX_LENGTH_DIFFERENCE:.0%} apart: that is not the same work. Ask at temperature 0, with "
        "ignore_eos, or replay (--replay)"
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
