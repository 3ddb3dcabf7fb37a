"""Progress as lines in a log and as bars in a terminal."""

import io

import pytest

from paceline.cli import progress as progress_module
from paceline.cli.progress import ConsoleProgress
from paceline.cli.sizes import size_text


class Clock:
    """`time.monotonic`, set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_per_stage_and_one_each_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), io.StringIO()
    monkeypatch.setattr(progress_module, "time", clock)
    with ConsoleProgress(log) as progress:
        for second in range(12):
            clock.now_s = float(second)
            progress.update("download", second * 10**6, 20 * 10**6)
        progress.update("convert", 0, 0)
    assert log.getvalue().splitlines() == [
        "   0.0 s  download",
        "   5.0 s  download 25 %",
        "  10.0 s  download 50 %",
        "  11.0 s  convert",
    ]


def test_a_terminal_gets_one_bar_with_bytes_or_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    progress = ConsoleProgress(terminal)
    with progress:
        progress.update("download", 1_500_000, 3_000_000)
        progress.update("load", 3, 30)
        assert progress._bars is not None
        (task,) = progress._bars.tasks
        assert (task.description, task.completed, task.fields["amount"]) == ("load", 3, "3/30")
    progress.update("load", 30, 30)  # after the end: nothing comes back
    assert "load" in terminal.getvalue()


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (4_294_967_296, "4.3 GB")]
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
