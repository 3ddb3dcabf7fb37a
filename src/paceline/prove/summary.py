"""Raw records -> what each arm did, per category and overall, at each concurrency. For `verdict.py`; ratios are made in `speedup.py`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.prove.acceptance_rates import acceptance_length, conditional_acceptance, joint_acceptance
from paceline.prove.judgement import Objectives
from paceline.prove.latency import (
    chunk_gaps_ms,
    decode_s,
    e2e_s,
    inter_token_ms,
    num_decode_steps,
    num_decode_tokens,
    percentiles,
    tpot_ms,
    ttft_ms,
    user_tps,
)
from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord
from paceline.prove.results import OVERALL, ArmSummary, ParetoPoint

Point = tuple[Arm, int, float]  # arm, concurrency, arrival rate


def summarise(
    records: Iterable[RequestRecord],
    runs: Iterable[BlockRun],
    objectives: Objectives,
    num_gpus: Mapping[Arm, int | None] | None = None,
) -> tuple[ArmSummary, ...]:
    """Of each arm at each concurrency (and rate): all categories, then OVERALL. Warm-up is no part of it.

    Latencies are over whole answers; cut streams and wrong finish reasons count as errors, and as misses of the objectives.
    `num_gpus`: of each arm's server, where it is known.
    """
    groups: dict[Point, dict[str, list[RequestRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.phase is Phase.MEASURE:
            group = groups[record.arm, record.concurrency, record.rate_per_s]
            group[record.category].append(record)
            group[OVERALL].append(record)
    walls = _wall_seconds(groups, runs)
    summaries = (
        _summary(point, category, groups[point][category], objectives, walls.get(point) if category == OVERALL else None)
        for point in sorted(groups, key=lambda point: (point[1], point[2], point[0].value))
        for category in sorted(groups[point], key=lambda category: (category == OVERALL, category))
    )
    return tuple(_per_gpu(summary, (num_gpus or {}).get(summary.arm)) for summary in summaries)


def pareto_points(arms: Iterable[ArmSummary]) -> tuple[ParetoPoint, ...]:
    """Speed of one user against that of all, of each arm at each concurrency of the closed loop."""
    return tuple(
        ParetoPoint(arm.concurrency, arm.arm, arm.user_tps, arm.output_tps, arm.output_tps_per_gpu)
        for arm in arms
        if arm.category == OVERALL and arm.concurrency > 0 and arm.user_tps is not None and arm.output_tps is not None
    )


def step_ms(records: Iterable[RequestRecord]) -> float | None:
    """Mean time of a decode step, over all steps of all answers; the wait for the first token is no step."""
    total = _decode_totals(records)
    return None if total is None else total[0] * 1e3 / total[2]


def projected_ratio(baseline: Iterable[RequestRecord], speculative: Iterable[RequestRecord]) -> float | None:
    """t_ar x AL / t_sd (SPEED-Bench, section on projection): the speed-up of decoding alone, prompts and waiting left out.

    AL is tokens per step over ALL steps of the arm, those without drafts included, because t_sd is the mean over the same steps.
    """
    plain, drafted = _decode_totals(baseline), _decode_totals(speculative)
    if plain is None or drafted is None:
        return None
    t_ar, t_sd = plain[0] / plain[2], drafted[0] / drafted[2]
    return t_ar * (drafted[1] / drafted[2]) / t_sd


def mean_user_tps(records: Iterable[RequestRecord]) -> float | None:
    return _mean([speed for record in records if (speed := user_tps(record)) is not None])


def _decode_totals(records: Iterable[RequestRecord]) -> tuple[float, int, float] | None:
    """Seconds, tokens and steps between first and last chunks."""
    seconds, num_tokens, num_steps = 0.0, 0, 0.0
    for record in records:
        steps = num_decode_steps(record)
        if steps is not None:
            seconds, num_tokens, num_steps = seconds + decode_s(record), num_tokens + num_decode_tokens(record), num_steps + steps
    return (seconds, num_tokens, num_steps) if num_steps else None


def _wall_seconds(groups: Iterable[Point], runs: Iterable[BlockRun]) -> dict[Point, float]:
    """Of all blocks that an arm ran at a concurrency or rate."""
    seconds: dict[Point, float] = defaultdict(float)
    for run in runs:
        if run.phase is Phase.MEASURE:
            seconds[run.arm, run.concurrency, run.rate_per_s] += run.end_s - run.start_s
    return {point: seconds[point] for point in groups if seconds.get(point, 0.0) > 0}


def _summary(point: Point, category: str, records: Sequence[RequestRecord], objectives: Objectives, wall_s: float | None) -> ArmSummary:
    arm, concurrency, rate_per_s = point
    whole = [record for record in records if record.error is None]
    num_tokens = sum(record.num_output_tokens for record in whole)
    inter_token = [inter_token_ms(record) for record in whole]
    conditional = conditional_acceptance(whole)
    return ArmSummary(
        arm=arm,
        concurrency=concurrency,
        category=category,
        num_requests=len(records),
        num_errors=len(records) - len(whole),
        num_output_tokens=num_tokens,
        mean_output_tokens=num_tokens / len(whole) if whole else 0.0,
        ttft_ms=percentiles(time for record in whole if (time := ttft_ms(record)) is not None),
        tpot_ms=percentiles(time for record in whole if (time := tpot_ms(record)) is not None),
        itl_ms=percentiles((time for times, _ in inter_token for time in times), (num for _, counts in inter_token for num in counts)),
        chunk_gap_ms=percentiles(gap for record in whole for gap in chunk_gaps_ms(record)),
        e2e_ms=percentiles(e2e_s(record) * 1e3 for record in whole),
        user_tps=mean_user_tps(whole),
        output_tps=num_tokens / wall_s if wall_s else None,
        requests_per_s=len(whole) / wall_s if wall_s else None,
        goodput=sum(_meets(record, objectives) for record in whole) / len(records) if records else None,
        acceptance_length=acceptance_length(whole),
        conditional_acceptance=conditional,
        joint_acceptance=joint_acceptance(conditional),
        step_ms=step_ms(whole),
        rate_per_s=rate_per_s,
    )


def _per_gpu(summary: ArmSummary, num_gpus: int | None) -> ArmSummary:
    if not num_gpus or summary.output_tps is None:
        return summary
    return replace(summary, output_tps_per_gpu=summary.output_tps / num_gpus)


def _meets(record: RequestRecord, objectives: Objectives) -> bool:
    """An answer of one token has no time per token, and so cannot miss that objective."""
    first_ms, token_ms = ttft_ms(record), tpot_ms(record)
    return (
        (objectives.ttft_ms is None or (first_ms is not None and first_ms <= objectives.ttft_ms))
        and (objectives.tpot_ms is None or token_ms is None or token_ms <= objectives.tpot_ms)
        and (objectives.e2e_ms is None or e2e_s(record) * 1e3 <= objectives.e2e_ms)
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
