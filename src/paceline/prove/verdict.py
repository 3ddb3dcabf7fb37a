"""The judgement of a measurement: INVALID, FAIL, INCONCLUSIVE or PASS, each with its reasons. Called by the command line.

INVALID        the comparison is not fair (`fairness.py`); nothing else is asked
FAIL           some cell is slower than 0.98 with certainty, or a required criterion is not met
PASS           the mix is faster at every concurrency (Holm), no cell is slower than 0.98 with certainty, every required criterion is met
INCONCLUSIVE   anything between, with the number of samples that are still needed
"""

import math
from collections.abc import Sequence

from paceline.prove.criteria import Criteria, Evidence, evaluate
from paceline.prove.fairness import unfair_reasons, unknown_precision
from paceline.prove.judgement import Judgement, JudgeOptions
from paceline.prove.pairing import Comparison, compare
from paceline.prove.plan import MIN_BLOCKS, Measurement
from paceline.prove.record import Arm
from paceline.prove.results import Criterion, Verdict, Work
from paceline.prove.speedup import Cell, Endpoint, SpeedAnalysis, analyse
from paceline.prove.statistics.sample_size import blocks_needed
from paceline.prove.summary import pareto_points, summarise

FASTER_THAN = 1.0
NOT_SLOWER_THAN = 0.98
RESOLUTION = 0.01  # of a ratio: how close to its threshold an estimate is worth being told from it
MAX_CELLS_NAMED = 5


def judge(measurement: Measurement, criteria: Criteria | None, options: JudgeOptions) -> Judgement:
    """Everything of a proof that follows from what was measured; the same input gives the same judgement."""
    comparisons = compare(measurement.records, measurement.runs)
    analysis = analyse(comparisons, options.num_resamples, options.seed)
    num_gpus = {arm: facts.num_gpus for arm, facts in measurement.servers.items()}
    arms = summarise(measurement.records, measurement.runs, options.objectives, num_gpus)
    model = measurement.servers[Arm.SPECULATIVE].model if Arm.SPECULATIVE in measurement.servers else "the model"
    evidence = Evidence(arms, analysis.speedup, measurement.records, model, options)
    held = () if criteria is None else evaluate(criteria, evidence)
    unfair = unfair_reasons(measurement, comparisons, options)
    if unfair:
        verdict, reasons = Verdict.INVALID, list(unfair)
    else:
        verdict, reasons = _decide(analysis, held, criteria, options.is_quick)
    reasons += _notes(comparisons, options.is_quick)
    reasons += _works(comparisons, measurement.replay_why)
    if unknown := unknown_precision(measurement.servers):
        reasons.append(unknown)
    return Judgement(verdict, tuple(reasons), held, arms, analysis.speedup, pareto_points(arms))


def _decide(analysis: SpeedAnalysis, held: Sequence[Criterion], criteria: Criteria | None, is_quick: bool) -> tuple[Verdict, list[str]]:
    """The verdict with the reasons for it, and then what else is worth knowing."""
    required = {rule.name for rule in criteria.rules if rule.required} if criteria is not None else set[str]()
    unmet = [_unmet(each) for each in held if each.passed is False and each.name in required]
    unknown = [_unmeasured(each) for each in held if each.passed is None and each.name in required]
    remarks = [_unmet(each) + "; it is not required" for each in held if each.passed is False and each.name not in required]
    remarks += [_unmeasured(each) + "; it is not required" for each in held if each.passed is None and each.name not in required]
    slower = _slower_cells(analysis)
    if slower or unmet:
        return Verdict.FAIL, slower + unmet + remarks
    open_questions = _open_questions(analysis, is_quick)
    if open_questions or unknown:
        keeps = [f"{reason}, and a required criterion that nobody measured cannot be passed" for reason in unknown]
        return Verdict.INCONCLUSIVE, open_questions + keeps + remarks
    return Verdict.PASS, _proven(analysis, is_quick) + remarks


def _unmet(criterion: Criterion) -> str:
    return f"{criterion.name}: {criterion.value:.4g}, required {criterion.threshold}"


def _unmeasured(criterion: Criterion) -> str:
    return f"{criterion.name} ({criterion.threshold}) could not be measured here"


def _slower_cells(analysis: SpeedAnalysis) -> list[str]:
    slower = [
        (cell, high) for cell, high in zip(analysis.cells, analysis.bounds.high, strict=True) if high is not None and high < NOT_SLOWER_THAN
    ]
    return [
        f"slower: {cell.name} runs at {cell.ratio:.3f}x, and is below {high:.3f}x with 95 % over all cells at once" for cell, high in slower
    ]


def _open_questions(analysis: SpeedAnalysis, is_quick: bool) -> list[str]:
    """What keeps the speed from being proven, with the samples it would take; none: it is proven."""
    if not analysis.endpoints:
        return ["nothing was compared: no block of prompts ran to its end in both arms of a closed loop"]
    questions = [_not_faster(endpoint) for endpoint in analysis.endpoints if not endpoint.is_faster]
    if is_quick:
        return questions
    unsure = [(cell, low) for cell, low in zip(analysis.cells, analysis.bounds.low, strict=True) if low is None or low <= NOT_SLOWER_THAN]
    tail = analysis.bounds.tail
    unsure.sort(key=lambda each: -_needed(each[0], NOT_SLOWER_THAN, tail))
    questions += [_not_shown(cell, low, tail) for cell, low in unsure[:MAX_CELLS_NAMED]]
    if len(unsure) > MAX_CELLS_NAMED:
        questions.append(f"{len(unsure) - MAX_CELLS_NAMED} more cells need fewer samples than these")
    return questions


def _not_faster(endpoint: Endpoint) -> str:
    cell = endpoint.cell
    known = (
        f"not shown to be faster: the mix at concurrency {cell.comparison.concurrency} runs at {cell.ratio:.3f}x, "
        f"lower bound {endpoint.low:.3f}x (Holm), required above {FASTER_THAN:.1f}x"
    )
    if endpoint.low > FASTER_THAN:  # its own bound would do, but Holm's procedure ended at another concurrency
        return f"{known} at every concurrency; it waits for the others"
    return f"{known}; {_samples(cell, FASTER_THAN, endpoint.level)}"


def _not_shown(cell: Cell, low: float | None, tail: float) -> str:
    bound = "too few blocks for a bound" if low is None else f"lower bound {low:.3f}x over all cells at once"
    known = f"not shown to be no slower: {cell.name} runs at {cell.ratio:.3f}x, {bound}, required above {NOT_SLOWER_THAN}x"
    return f"{known}; {_samples(cell, NOT_SLOWER_THAN, tail)}"


def _samples(cell: Cell, threshold: float, alpha: float) -> str:
    """The samples still needed, in blocks and in pairs of requests."""
    needed = _needed(cell, threshold, alpha)
    if math.isinf(needed):
        return "too few blocks ran to say how many more it takes: measure at least 8"
    missing = max(1, int(needed) - cell.num_blocks)
    num_pairs = math.ceil(missing * len(cell.pairs) / cell.num_blocks)
    words = (
        f"about {missing:,} more block{'s' if missing > 1 else ''} ({num_pairs:,} more pairs of requests; {cell.num_blocks} blocks so far)"
    )
    if _distance(cell, threshold) >= RESOLUTION:
        return f"needs {words}"
    if cell.ratio > threshold:
        return f"its estimate is within {RESOLUTION:.0%} of that; to be sure of a difference of {RESOLUTION:.0%} takes {words}"
    return (
        f"its estimate itself is not above that, so more samples would hardly pass it; to be sure to within {RESOLUTION:.0%} takes {words}"
    )


def _distance(cell: Cell, threshold: float) -> float:
    return cell.ratio / threshold - 1


def _needed(cell: Cell, threshold: float, alpha: float) -> float:
    distance = math.log1p(max(abs(_distance(cell, threshold)) if cell.ratio > threshold else 0.0, RESOLUTION))
    needed = blocks_needed(distance, cell.standard_error, cell.num_blocks, alpha)
    return math.inf if needed is None else float(needed)


def _proven(analysis: SpeedAnalysis, is_quick: bool) -> list[str]:
    reasons = [
        f"faster: the mix at concurrency {endpoint.cell.comparison.concurrency} runs at {endpoint.cell.ratio:.3f}x, "
        f"lower bound {endpoint.low:.3f}x (Holm over {len(analysis.endpoints)})"
        for endpoint in analysis.endpoints
    ]
    if not is_quick:
        lows = [low for low in analysis.bounds.low if low is not None]
        reasons.append(f"no slower anywhere: the lowest lower bound of {len(lows)} cells is {min(lows):.3f}x with 95 % over all at once")
    return reasons


def _notes(comparisons: Sequence[Comparison], is_quick: bool) -> list[str]:
    notes: list[str] = []
    if is_quick:
        notes.append(
            f"quick proof: it judges the mix at the concurrencies that it ran; cells have too few samples to show that each is "
            f"no slower than {NOT_SLOWER_THAN}x, and are only checked for being slower with certainty"
        )
    for comparison in comparisons:
        if comparison.num_left_out:
            notes.append(
                f"at concurrency {comparison.concurrency}, {comparison.num_left_out} of "
                f"{comparison.num_left_out + len(comparison.blocks)} blocks were not whole in both arms and enter no ratio"
            )
        if comparison.num_repeated_prompts:
            notes.append(
                f"at concurrency {comparison.concurrency}, {comparison.num_repeated_prompts} of {comparison.num_prompts} prompts stand in "
                f"several blocks, which are then no samples of prompts of their own: the intervals hold for these prompts, and are too "
                f"narrow for others like them; take at least {MIN_BLOCKS * comparison.concurrency} prompts, or a lower concurrency"
            )
    return notes


def _works(comparisons: Sequence[Comparison], replay_why: str) -> list[str]:
    """What the ratios are over, and why, for the concurrencies of each kind together."""
    concurrencies: dict[Work, list[int]] = {}
    for comparison in comparisons:
        if comparison.blocks:
            concurrencies.setdefault(comparison.work, []).append(comparison.concurrency)
    why = f" ({replay_why})" if replay_why else ""
    words = {
        Work.IDENTICAL: "both arms gave the same tokens: ratios are of total time over identical tokens",
        Work.REPLAYED: f"conversations were recorded once and replayed in both arms{why}: ratios are of total time over equal prompts and "
        "equal numbers of tokens, although the texts may differ",
        Work.EQUAL_LENGTHS: f"answers differ between the arms, but not in length{why}: ratios are of total time over equal numbers "
        "of tokens",
        Work.PER_TOKEN: f"answers differ in length between the arms{why}: ratios are of time per output token",
    }
    return [f"at concurrency {', '.join(map(str, found))}, {words[work]}" for work, found in concurrencies.items()]
