"""A soak in the terminal, and as the command's exit code."""

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from paceline.cli.main import run
from paceline.prove import soak as soak_module
from paceline.prove.report.soak_table import print_soak
from paceline.prove.results import Verdict
from paceline.prove.soak_plan import SoakMinute, SoakOptions, SoakResult, Trend


def result(verdict: Verdict) -> SoakResult:
    return SoakResult(
        verdict=verdict,
        reasons=("the memory grows [red]\x1b[31m",),
        duration_s=180.0,
        is_complete=False,
        num_requests=1234,
        num_errors=2,
        errors={"HTTP 503 [bold]": 2},
        minutes=tuple(SoakMinute(minute, 400, 0, 51.5, 812.25, 41, None, 0.731) for minute in range(1, 4)),
        trends=(Trend("rss_mib", 12.5, 11.0, 14.0, 2.0, True, 30), Trend("num_fds", 0.0, -0.1, 0.1, 1.0, False, 30)),
    )


def test_minutes_trends_and_verdict_are_there() -> None:
    stream = StringIO()
    print_soak(result(Verdict.FAIL), Console(file=stream, width=120, color_system=None))
    text = stream.getvalue()
    for words in (
        "812",
        "51.5",
        "0.731",
        "\u2013",
        "rss_mib",
        "leaks",
        "steady",
        "11.000 to 14.000",
        "2 times: HTTP 503 [bold]",
        "FAIL: 1,234",
    ):
        assert words in text
    assert "stopped before its time" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_command_soaks_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    asked: list[tuple[str, SoakOptions]] = []

    async def soak(url: str, options: SoakOptions, show: Callable[[str, int, int], None]) -> SoakResult:
        asked.append((url, options))
        show("minute 1", 60, 180)
        return result(verdict)

    monkeypatch.setattr(soak_module, "soak", soak)
    assert run(["prove", "--soak", "3m", "--url", "http://127.0.0.1:1", "--model", "m", "--api-key", "k"]) == verdict.exit_code
    ((url, options),) = asked
    assert (url, options.duration_s, options.model, options.api_key) == ("http://127.0.0.1:1", 180.0, "m", "k")
