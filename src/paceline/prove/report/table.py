"""The proof in a terminal: the verdict, the comparison, the cells. Nothing that a server or a data set says is taken for rich's markup."""

from typing import TYPE_CHECKING

from paceline.prove.report.comparison import comparison
from paceline.prove.report.markup import visible
from paceline.prove.report.plots import category_order
from paceline.prove.report.sections import data_lines, warning_lines
from paceline.prove.report.words import (
    at_concurrency,
    cell_of,
    certificate_sentence,
    concurrencies,
    interval,
    sentence,
    significant,
    threshold_parts,
    times,
)
from paceline.prove.results import OVERALL, Proof, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_TONES = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.INVALID: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}


def print_proof(proof: Proof, console: "Console") -> None:
    """What a reader wants at the end of a run; the verdict comes last, where the eye is."""
    _print_comparison(proof, console)
    _print_speedups(proof, console)
    _print_criteria(proof, console)
    _print_certificate(proof, console)
    for line in data_lines(proof):
        _say(console, line, "dim")
    for line in warning_lines(proof):
        _say(console, f"warning: {line}", "yellow")
    console.print()
    _say(console, f"{proof.verdict.value}: {sentence(proof.verdict)}", _TONES[proof.verdict])
    for reason in proof.reasons:
        _say(console, f"  {reason}")


def _say(console: "Console", line: str, style: str = "") -> None:
    console.print(visible(line), style=style, markup=False, highlight=False, soft_wrap=True)


def _print_comparison(proof: Proof, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    table.add_column("")
    for head in ("traditional", "accelerated", "improvement"):
        table.add_column(head, justify="right")
    for point, rows in comparison(proof):
        table.add_row(Text(str(point), "bold"))
        for row in rows:
            tone = {True: "green", False: "red", None: ""}[row.is_better]
            table.add_row(*(Text(visible(text)) for text in (row.label, row.baseline, row.speculative)), Text(row.improvement, tone))
    console.print(table)


def _print_speedups(proof: Proof, console: "Console") -> None:
    """Categories down, concurrencies across: the ratio and its interval."""
    from rich.table import Table
    from rich.text import Text

    columns = concurrencies(proof)
    if not columns:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("speed-up")
    for concurrency in columns:
        table.add_column(at_concurrency(concurrency), justify="right")
    for category in [*category_order({cell.category for cell in proof.speedup}), OVERALL]:
        texts: list[Text] = []
        for concurrency in columns:
            cell = cell_of(proof, concurrency, category)
            if cell is None:
                texts.append(Text(""))
                continue
            low, high = cell.ci95
            tone = "green" if low > 1 else "red" if high < 1 else ""
            texts.append(Text(f"{times(cell.ratio)}  {interval(cell.ci95)}", tone))
        is_all = category == OVERALL
        table.add_row(Text("all together" if is_all else visible(category), "bold" if is_all else ""), *texts)
    console.print()
    console.print(table)


def _print_criteria(proof: Proof, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    if not proof.criteria:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("criterion")
    for head in ("threshold", "measured"):
        table.add_column(head, justify="right")
    table.add_column("")
    words = {True: Text("met", "green"), False: Text("not met", "red"), None: Text("not measured", "dim")}
    for one in proof.criteria:
        bound, _ = threshold_parts(visible(one.threshold))
        table.add_row(Text(visible(one.name)), Text(bound), significant(one.value), words[one.passed])
    console.print()
    console.print(table)


def _print_certificate(proof: Proof, console: "Console") -> None:
    found = proof.certificate
    if found is None:
        return
    words = {True: "identical", False: "NOT identical", None: "not compared"}
    laws = f", {len(found.law_tests)} laws tested" if found.law_tests else ""
    counts = f"greedy {words[found.greedy_identical]}, seeded {words[found.seeded_identical]}, {found.num_compared:,} pairs{laws}"
    console.print()
    _say(console, f"certificate: {certificate_sentence(found)} ({counts})", {True: "green", False: "red", None: "yellow"}[found.holds])
    for line in (*found.broken, *found.unknown):
        _say(console, f"  {line}")
