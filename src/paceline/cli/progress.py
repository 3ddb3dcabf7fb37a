"""Progress in the terminal: a bar for each stage of a download, conversion or load, or plain lines where stderr is no terminal.

One `ConsoleProgress` per command; it is a `core.progress.Progress`.
"""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from paceline.cli.sizes import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_FEW = 100_000  # a stage with more units than this counts bytes
_PLAIN_INTERVAL_S = 5.0  # a log gets a line per stage, and one more for each of these


class ConsoleProgress:
    """Use as a context manager; the display ends with it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream` is stderr unless tests bring another."""
        self._stream = sys.stderr if stream is None else stream
        self._started_s = time.monotonic()
        self._printed_s = 0.0
        self._stage: str | None = None
        self._task: TaskID | None = None
        self._bars: Progress | None = _bars(self._stream) if self._stream.isatty() else None

    def __enter__(self) -> "ConsoleProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the display away, so that other output can follow; more updates bring nothing back."""
        if self._bars is not None:
            self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are done; a total of 0 is unknown."""
        if self._bars is not None:
            self._update_bar(self._bars, stage, done, total)
        else:
            self._print_line(stage, done, total)
        self._stage = stage

    def _update_bar(self, bars: "Progress", stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._task is None:
            if self._task is not None:
                bars.remove_task(self._task)
            self._task = bars.add_task(stage, total=total or None, amount="")
        bars.update(self._task, completed=done, total=total or None, amount=_amount(done, total))

    def _print_line(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage == self._stage and now_s - self._printed_s < _PLAIN_INTERVAL_S:
            return
        self._printed_s = now_s
        share = f" {100 * done / total:.0f} %" if total and done else ""
        print(f"{now_s - self._started_s:6.1f} s  {stage}{share}", file=self._stream, flush=True)


def _bars(stream: TextIO) -> "Progress":
    # Imported here: most commands show no progress and should start at once.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=stream), transient=True)


def _amount(done: int, total: int) -> str:
    """`12/30` for few units, `1.2 MB / 93.0 MB` for bytes."""
    if total < _FEW:
        return f"{done}/{total}" if total else ""
    return f"{size_text(done)} / {size_text(total)}"
