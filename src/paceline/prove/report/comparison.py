"""Traditional against accelerated, as both the page and the terminal show it: one row per measure, per point of the sweep."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from paceline.prove.record import Arm
from paceline.prove.report.words import NONE, TIMES, WORK_WORDS, arm_of, cell_of, interval_words, number, points, significant, times
from paceline.prove.results import ArmSummary, Proof
from paceline.prove.schedule import Point

_VISIBLE_CHANGE = 0.005  # below half a per cent both are called the same


@dataclass(frozen=True, slots=True)
class Row:
    """One line: two figures as text and what came of it."""

    label: str
    baseline: str
    speculative: str
    improvement: str
    is_better: bool | None = None  # None: no interval shows it


@dataclass(frozen=True, slots=True)
class _Measure:
    label: str
    value: Callable[[ArmSummary], float | None]
    is_time: bool  # lower is better


_MEASURES = (
    _Measure("first token, median (ms)", lambda arm: arm.ttft_ms and arm.ttft_ms.p50, True),
    _Measure("first token, 95th percentile (ms)", lambda arm: arm.ttft_ms and arm.ttft_ms.p95, True),
    _Measure("each further token, median (ms)", lambda arm: arm.tpot_ms and arm.tpot_ms.p50, True),
    _Measure("whole answer, median (ms)", lambda arm: arm.e2e_ms and arm.e2e_ms.p50, True),
    _Measure("speed of one answer (tokens/s)", lambda arm: arm.user_tps, False),
    _Measure("throughput (tokens/s)", lambda arm: arm.output_tps, False),
    _Measure("throughput per GPU (tokens/s)", lambda arm: arm.output_tps_per_gpu, False),
    _Measure("throughput (requests/s)", lambda arm: arm.requests_per_s, False),
)


def comparison(proof: Proof) -> list[tuple[Point, list[Row]]]:
    """The rows of each point where something was measured."""
    return [(point, list(_rows(proof, point))) for point in points(proof)]


def _rows(proof: Proof, point: Point) -> Iterator[Row]:
    cell = cell_of(proof, point.concurrency)
    if cell is not None:
        low, high = cell.ci95
        verdict = True if low > 1 else False if high < 1 else None
        yield Row(WORK_WORDS[cell.work], times(1.0), times(cell.ratio), interval_words(cell.ci95), verdict)
    plain, fast = arm_of(proof, Arm.BASELINE, point), arm_of(proof, Arm.SPECULATIVE, point)
    for measure in _MEASURES:
        before = None if plain is None else measure.value(plain)
        after = None if fast is None else measure.value(fast)
        if before is not None or after is not None:
            yield Row(measure.label, significant(before), significant(after), improvement(before, after, measure.is_time))
    yield from _utilisation_rows(proof, point)


def improvement(before: float | None, after: float | None, is_time: bool) -> str:
    """What became of a figure, in words; a ratio of nothing is NONE."""
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)) or before <= 0 or after <= 0:
        return NONE
    change = after / before - 1
    if abs(change) < _VISIBLE_CHANGE:
        return "the same"
    if is_time:
        return f"{abs(change) * 100:.0f} % {'longer' if change > 0 else 'shorter'}"
    if change >= 1:
        return f"{after / before:.1f}{TIMES} as much"
    return f"{abs(change) * 100:.0f} % {'more' if change > 0 else 'less'}"


def _utilisation_rows(proof: Proof, point: Point) -> Iterator[Row]:
    """How busy the device was, by the counter that was read; not judged, for busy is neither good nor bad by itself.

    `environment["utilisation"]` holds entries {counter, concurrency, rate_per_s, baseline, speculative}, in per cent.
    """
    entries = proof.environment.get("utilisation")
    shown = False
    for entry in cast(list[Mapping[str, object]], entries) if isinstance(entries, list) else ():
        if (entry.get("concurrency"), entry.get("rate_per_s", 0.0)) == (point.concurrency, point.rate_per_s):
            yield Row(f"utilisation (%): {entry.get('counter')}", _percent(entry.get("baseline")), _percent(entry.get("speculative")), NONE)
            shown = True
    if not shown:
        yield Row("utilisation (%)", NONE, NONE, "no counter was readable")


def _percent(value: object) -> str:
    return number(float(value), 0) if isinstance(value, int | float) else NONE
