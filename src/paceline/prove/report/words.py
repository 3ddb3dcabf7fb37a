"""Numbers and verdicts in words, the same in the page and in the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from paceline.prove.record import Arm
from paceline.prove.results import OVERALL, ArmSummary, Certificate, Proof, Speedup, Verdict, Work
from paceline.prove.schedule import Point

NONE = "\u2013"  # a dash
"""In the place of a figure that could not be measured."""

TIMES = "\u00d7"  # the sign of multiplication

WORK_WORDS = {
    Work.IDENTICAL: "speed over the same tokens",
    Work.REPLAYED: "speed over equal work (replayed)",
    Work.EQUAL_LENGTHS: "speed over answers of equal length",
    Work.PER_TOKEN: "speed per token",
}

ARM_NAMES = {Arm.BASELINE: "traditional", Arm.SPECULATIVE: "accelerated"}

_MAX_CHARS = 500  # of one value of the environment: a server says what it likes

_SENTENCES = {
    Verdict.PASS: "Accelerated decoding is faster here, and it kept every promise that was checked.",
    Verdict.FAIL: "A promise that was checked is broken here.",
    Verdict.INVALID: "The two ways of decoding were not measured under equal conditions, so this comparison says nothing.",
    Verdict.INCONCLUSIVE: "There is too little data for a judgement in either direction.",
}


def number(value: float | None, digits: int = 2) -> str:
    """A figure with thousands separated; NONE for what is missing."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def significant(value: float | None) -> str:
    """Three significant digits for what spans orders of magnitude, such as milliseconds and rates."""
    if value is None or not math.isfinite(value):
        return NONE
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return number(value, digits)


def times(value: float | None) -> str:
    """A ratio, such as 1.42 with the sign of multiplication."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.2f}{TIMES}"


def interval(bounds: tuple[float, float]) -> str:
    """`1.30 to 1.52`; NONE where there were too few blocks to know any bound."""
    return f"{number(bounds[0])} to {number(bounds[1])}" if all(map(math.isfinite, bounds)) else NONE


def interval_words(bounds: tuple[float, float]) -> str:
    """The same as a phrase."""
    text = interval(bounds)
    return "too few blocks for an interval" if text == NONE else f"95 % interval {text}"


def threshold_parts(threshold: str) -> tuple[str, str]:
    """A threshold, and under which conditions it was measured, if those stand behind it in parentheses."""
    bound, _, conditions = threshold.partition(" (")
    return bound, conditions.removesuffix(")")


def at_concurrency(concurrency: int) -> str:
    """How a point of the closed loop is named."""
    return str(Point(concurrency))


def overall(proof: Proof) -> list[Speedup]:
    """The ratios over all categories, in the order of concurrency."""
    return sorted((cell for cell in proof.speedup if cell.category == OVERALL), key=lambda cell: cell.concurrency)


def concurrencies(proof: Proof) -> list[int]:
    """Those of the closed loop that have ratios."""
    return sorted({cell.concurrency for cell in proof.speedup})


def points(proof: Proof) -> list[Point]:
    """All settings that were measured: open loops by their rate, then concurrencies."""
    found = {(arm.concurrency, arm.rate_per_s) for arm in proof.arms} | {(cell.concurrency, 0.0) for cell in proof.speedup}
    return [Point(*point) for point in sorted(found)]


def point_of(one: ArmSummary | Speedup) -> Point:
    return Point(one.concurrency, one.rate_per_s if isinstance(one, ArmSummary) else 0.0)


def arm_of(proof: Proof, arm: Arm, point: Point, category: str = OVERALL) -> ArmSummary | None:
    """The summary of one cell, or None if it was not measured."""
    return next((one for one in proof.arms if (one.arm, point_of(one), one.category) == (arm, point, category)), None)


def cell_of(proof: Proof, concurrency: int, category: str = OVERALL) -> Speedup | None:
    return next((cell for cell in proof.speedup if (cell.concurrency, cell.category) == (concurrency, category)), None)


def headline(proof: Proof) -> str:
    """The verdict as a plain sentence, and the measured ratios behind it."""
    cells = overall(proof)
    shown = "; ".join(f"{times(cell.ratio)} at {at_concurrency(cell.concurrency)} ({interval_words(cell.ci95)})" for cell in cells)
    works = {cell.work for cell in cells}
    named = WORK_WORDS[works.pop()] if len(works) == 1 else "speed"
    return _SENTENCES[proof.verdict] + (f" {named.capitalize()}: {shown}." if shown else "")


def sentence(verdict: Verdict) -> str:
    return _SENTENCES[verdict]


def certificate_sentence(found: Certificate) -> str:
    """What a certificate comes to."""
    return {
        True: "Accelerated decoding gives what plain decoding gives, up to near ties.",
        False: "Accelerated decoding changes the output.",
        None: "Nothing was seen to change the output, but not everything could be checked.",
    }[found.holds]


def text_of(value: object) -> str:
    """A value of the environment for people."""
    if value is None:
        return "not stated by the server"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(item) for item in cast(Sequence[object], value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(item)}" for key, item in cast(Mapping[str, object], value).items())
    text = str(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
