"""A soak in a terminal: a line per minute, the trends, the verdict."""

from typing import TYPE_CHECKING

from paceline.prove.report.markup import visible
from paceline.prove.report.words import NONE, number, significant
from paceline.prove.soak_plan import SoakResult

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_MINUTES = 60


def print_soak(result: SoakResult, console: "Console") -> None:
    """The last hour by the minute, then what was fitted over all of it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("minute", "requests", "errors", "tokens/s", "RSS (MiB)", "files", "free pages", "accepted"):
        table.add_column(head, justify="right")
    for one in result.minutes[-_SHOWN_MINUTES:]:
        rate, rss, accepted = significant(one.tokens_per_s), significant(one.rss_mib), number(one.acceptance, 3)
        table.add_row(
            str(one.minute),
            _count(one.num_requests),
            _count(one.num_errors),
            rate,
            rss,
            _count(one.num_fds),
            _count(one.num_free_pages),
            accepted,
        )
    console.print(table)
    trends = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("trend per hour", "slope", "99 % interval", "bound", ""):
        trends.add_column(head, justify="left" if head in ("trend per hour", "") else "right")
    for one in result.trends:
        word = Text("leaks", "red") if one.is_leak else Text("steady", "green")
        trends.add_row(
            visible(one.name), number(one.per_hour, 3), f"{number(one.low, 3)} to {number(one.high, 3)}", number(one.bound, 3), word
        )
    console.print()
    console.print(trends)
    for text, num in sorted(result.errors.items(), key=lambda item: -item[1])[:10]:
        console.print(f"{num:,} times: {visible(text)}", markup=False, highlight=False)
    console.print()
    early = "" if result.is_complete else ", stopped before its time"
    console.print(
        f"{result.verdict.value}: {result.num_requests:,} requests in {result.duration_s:,.0f} s{early}", markup=False, highlight=False
    )
    for reason in result.reasons:
        console.print(f"  {visible(reason)}", markup=False, highlight=False)


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
