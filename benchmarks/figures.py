"""What a row of `decode.py` gives: figures with intervals, printed as one table and kept as lines of JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paired import Effort, Interval


@dataclass(frozen=True)
class Figure:
    """One line of the table. `gb_s`: weights read per second, where weights are what is waited for."""

    name: str
    value: Interval
    unit: str
    what: str
    gb_s: Interval | None = None
    details: dict[str, object] = field(default_factory=dict[str, object])

    def record(self) -> dict[str, object]:
        """As a line of results, without the environment."""
        value, low, high = self.value
        line: dict[str, object] = {"row": self.name, "value": _rounded(value), "ci95": [_rounded(low), _rounded(high)], "unit": self.unit}
        if self.gb_s is not None:
            line |= {"gb_s": round(self.gb_s[0], 2), "gb_s_ci95": [round(end, 2) for end in self.gb_s[1:]]}
        return line | self.details


Measure = Callable[[Effort], Sequence[Figure]]


@dataclass(frozen=True)
class Row:
    """Some figures that are measured together; `needs` names models that must be in the cache, for they are large downloads.

    `time_share`: how much of the time limit it takes, 1 unless its rounds differ so much that a few of them say little.
    """

    measure: Measure
    needs: tuple[str, ...] = ()
    time_share: float = 1.0


def heading() -> str:
    return f"{'row':<24} {'figure':>10}  {'95 %':>18}  {'':<9} {'GB/s':>5}  what is measured"


def line(figure: Figure) -> str:
    value, low, high = figure.value
    interval = f"[{_shown(low)}, {_shown(high)}]"
    read = "" if figure.gb_s is None else f"{figure.gb_s[0]:.1f}"
    return f"{figure.name:<24} {_shown(value):>10}  {interval:>18}  {figure.unit:<9} {read:>5}  {figure.what}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
