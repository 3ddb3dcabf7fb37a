"""The plots of the page as inline SVG: speed-up by category, Pareto, acceptance by position. matplotlib is loaded when the first is drawn.

Colours are the page's CSS variables, so that a plot follows light, dark and print; text stays text. Ids get a prefix per plot, for one page
holds several.
"""

# matplotlib's own stubs leave its keyword arguments open, so that every call is "partially unknown".
# pyright: reportUnknownMemberType=false

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingError
from paceline.prove.datasets.prompt import CATEGORIES, ENTROPY_TIERS
from paceline.prove.record import Arm
from paceline.prove.report.markup import Markup, visible
from paceline.prove.report.words import ARM_NAMES, TIMES, arm_of, at_concurrency, cell_of, concurrencies, point_of, points, times
from paceline.prove.results import OVERALL, ParetoPoint, Proof, Speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib wants colours, the page has variables: each stand-in below is replaced in the SVG's styles.
_INK, _MUTED, _GRID, _PLAIN, _FAST, _BAD = (f"#01020{digit}" for digit in range(3, 9))
_VARIABLES = {_INK: "ink", _MUTED: "muted", _GRID: "line", _PLAIN: "plain", _FAST: "fast", _BAD: "bad"}
_ARM_COLOURS = {Arm.BASELINE: _PLAIN, Arm.SPECULATIVE: _FAST}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "text.parse_math": False,  # a category may hold a dollar sign
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
_RATIO_TICKS = (1.0, 2.0, 0.5, 5.0, 0.2, 1.5, 0.67, 1.25, 0.8, 3.0, 0.33, 10.0, 0.1, 20.0, 1.1, 0.9)  # the plainest first
_LOWEST_RATIO, _HIGHEST_RATIO = 0.1, 20.0
_MAX_TICKS = 7
_LABEL_CHARS = 24
_PANELS_PER_ROW = 3


def category_order(names: set[str]) -> list[str]:
    """SPEED-Bench's categories in its order, then others by name; OVERALL is not among them."""
    known = [name for name in (*CATEGORIES, *ENTROPY_TIERS) if name in names]
    return known + sorted(names - {*known, OVERALL})


def speedup_plot(proof: Proof) -> Markup | None:
    """A forest plot: one panel per concurrency, one line per category with its 95 % interval, all of them together at the bottom."""
    panels = [concurrency for concurrency in concurrencies(proof) if cell_of(proof, concurrency) or _cells(proof, concurrency)]
    rows = [*category_order({cell.category for cell in proof.speedup}), OVERALL]
    limits = _ratio_limits(proof.speedup)
    if not panels or limits is None:
        return None
    num_columns = min(len(panels), _PANELS_PER_ROW)
    num_rows = math.ceil(len(panels) / num_columns)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place < len(panels):
                _forest(axes, proof, panels[place], rows, limits)
            else:
                axes.set_visible(False)

    height = num_rows * (0.29 * len(rows) + 1.0)
    return _drawn("speedup", "Speed-up by category, with 95 % intervals", (9.4, height), draw)


def _cells(proof: Proof, concurrency: int) -> list[Speedup]:
    return [cell for cell in proof.speedup if cell.concurrency == concurrency and math.isfinite(cell.ratio) and cell.ratio > 0]


def _ratio_limits(cells: Sequence[Speedup]) -> tuple[float, float] | None:
    """The range of the axis: all intervals and 1.0, within what a ratio can sensibly be."""
    ends = [end for cell in cells for end in (*cell.ci95, cell.ratio) if math.isfinite(end) and end > 0]
    if not ends:
        return None
    return max(min(*ends, 0.95) * 0.97, _LOWEST_RATIO), min(max(*ends, 1.05) * 1.03, _HIGHEST_RATIO)


def _ticks(limits: tuple[float, float]) -> list[float]:
    """Round ratios within the limits, the plainest first, as many as have room."""
    room = math.log(limits[1] / limits[0]) / _MAX_TICKS
    ticks: list[float] = []
    for tick in _RATIO_TICKS:
        if limits[0] <= tick <= limits[1] and all(abs(math.log(tick / other)) >= room for other in ticks):
            ticks.append(tick)
    return sorted(ticks)


def _forest(axes: "Axes", proof: Proof, concurrency: int, rows: list[str], limits: tuple[float, float]) -> None:
    axes.axvline(1.0, color=_MUTED, linewidth=1)
    for row, category in enumerate(rows):
        cell = cell_of(proof, concurrency, category)
        if cell is None or not math.isfinite(cell.ratio) or cell.ratio <= 0:
            continue
        low, high = cell.ci95
        colour = _BAD if high < 1 else _FAST if low > 1 else _PLAIN  # grey: the interval holds 1.0
        is_all = category == OVERALL
        if math.isfinite(low) and math.isfinite(high):
            axes.plot([max(low, limits[0]), min(high, limits[1])], [row, row], color=colour, linewidth=2.6 if is_all else 1.6)
        axes.plot([cell.ratio], [row], marker="D" if is_all else "o", markersize=6.5 if is_all else 5, color=colour, linestyle="none")
        label = times(cell.ratio)
        axes.text(1.02, row, label, transform=axes.get_yaxis_transform(), va="center", color=_INK if is_all else _MUTED, clip_on=False)
    axes.axhline(len(rows) - 1.5, color=_GRID, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    ticks = _ticks(limits)
    axes.set_xticks(ticks, labels=[f"{tick:g}{TIMES}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), labels=[_label("all together" if row == OVERALL else row) for row in rows], color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_title(at_concurrency(concurrency))


def pareto_plot(proof: Proof) -> Markup | None:
    """Speed of one user's answer against tokens of all users; a point per concurrency, a line per arm. Up and to the right is better.

    Throughput is per GPU, as SPEED-Bench draws it, where the number of GPUs is known of both arms.
    """
    if not proof.pareto:
        return None
    is_per_gpu = all(point.output_tps_per_gpu is not None for point in proof.pareto)

    def throughput(point: ParetoPoint) -> float:
        return (point.output_tps_per_gpu if is_per_gpu else None) or point.output_tps

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for arm, colour in _ARM_COLOURS.items():
            mine = sorted((point for point in proof.pareto if point.arm == arm), key=lambda point: point.concurrency)
            if not mine:
                continue
            xs, ys = [point.user_tps for point in mine], [throughput(point) for point in mine]
            axes.plot(xs, ys, marker="o", markersize=5, linewidth=1.6, color=colour, label=ARM_NAMES[arm])
            # On either side of their points: those of both arms often lie next to each other.
            is_above = arm == Arm.SPECULATIVE
            for point in mine:
                axes.annotate(
                    str(point.concurrency),
                    (point.user_tps, throughput(point)),
                    (6, 5) if is_above else (-6, -5),
                    textcoords="offset points",
                    ha="left" if is_above else "right",
                    va="bottom" if is_above else "top",
                    color=colour,
                    fontsize=8.5,
                )
        axes.set_xlim(0, 1.12 * max(point.user_tps for point in proof.pareto))
        axes.set_ylim(0, 1.12 * max(throughput(point) for point in proof.pareto))
        axes.set_xlabel("tokens/s of one answer")
        axes.set_ylabel("tokens/s of all answers, per GPU" if is_per_gpu else "tokens/s of all answers")
        axes.grid()
        axes.set_axisbelow(True)
        axes.legend(loc="best")

    return _drawn("pareto", "Speed of one answer against throughput, by concurrency", (4.6, 3.4), draw)


def acceptance_plot(proof: Proof) -> Markup | None:
    """How often the draft at each position is accepted: given that those before it were (solid), and at all (dashed)."""
    found = [arm_of(proof, Arm.SPECULATIVE, point) for point in points(proof)]
    arms = [arm for arm in found if arm is not None and arm.conditional_acceptance]
    if not arms:
        return None

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        markers = "osD^v<>pPX*"
        for place, arm in enumerate(arms):
            positions = list(range(1, len(arm.conditional_acceptance) + 1))
            look: dict[str, Any] = {
                "color": _FAST,
                "marker": markers[place % len(markers)],
                "markersize": 4.5,
                "alpha": 1 - 0.6 * place / len(arms),
            }
            axes.plot(positions, arm.conditional_acceptance, linewidth=1.6, label=str(point_of(arm)), **look)
            if arm.joint_acceptance:
                axes.plot(positions[: len(arm.joint_acceptance)], arm.joint_acceptance, linewidth=1.2, linestyle=(0, (4, 3)), **look)
        axes.set_ylim(0, 1.02)
        axes.set_xticks(list(range(1, max(len(arm.conditional_acceptance) for arm in arms) + 1)))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share accepted")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.legend(loc="best")

    return _drawn("acceptance", "Share of drafts accepted by position", (4.6, 3.4), draw)


def _label(text: str) -> str:
    text = " ".join(visible(text).split())
    return text if len(text) <= _LABEL_CHARS else text[: _LABEL_CHARS - 1] + "…"


def _drawn(name: str, title: str, inches: tuple[float, float], draw: "Callable[[Figure], None]") -> Markup:
    """The SVG of what `draw` puts on a figure. Raises MissingError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError("the plots of the page need matplotlib; pip install 'paceline[prove]', or leave out --html") from None
    text = io.StringIO()
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's own font lacks: the reader's browser has them
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inlined(text.getvalue(), name, title)


def _inlined(document: str, name: str, title: str) -> Markup:
    """The `<svg>` element of a document: coloured by the page's variables, with ids of its own, named for screen readers."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)  # that style would hold for the whole page
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r"(font: (?:bold )?[0-9.]+px) [^;\"]*", r"\1 sans-serif", svg)
    svg = re.sub(r' (?:width|height)="[0-9.]+pt"', "", svg, count=2)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return Markup(svg.replace("<svg ", f'<svg class="plot" role="img" aria-label="{title}" ', 1))
