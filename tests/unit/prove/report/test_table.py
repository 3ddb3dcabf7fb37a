"""The tables in the terminal: the figures, and nothing that steers the terminal."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from paceline.prove.report.comparison import improvement
from paceline.prove.report.table import print_proof
from paceline.prove.results import Proof, Verdict, Work
from tests.fakes.made_proof import made_environment, made_proof


def printed(proof: Proof, width: int = 120) -> str:
    stream = StringIO()
    print_proof(proof, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_it_ends_with_the_verdict_and_its_reasons() -> None:
    lines = printed(made_proof()).rstrip().splitlines()
    assert lines[-2].startswith("PASS: ")
    assert "Holm" in lines[-1]
    text = "\n".join(lines)
    for words in ("not SPEED-Bench", "first token, median (ms)", "multilingual", "not met", "1.36", "utilisation", "identical"):
        assert words in text


def test_throughput_per_gpu_has_a_line_only_where_it_is_known() -> None:
    proof = made_proof()
    assert "per GPU" not in printed(proof)
    arms = tuple(replace(arm, output_tps_per_gpu=12345.0) for arm in proof.arms)
    assert "throughput per GPU (tokens/s)" in printed(replace(proof, arms=arms))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_each_verdict_without_any_figure(verdict: Verdict) -> None:
    assert f"{verdict.value}: " in printed(Proof(verdict, (), {}, (), (), (), None, ()))


def test_text_of_others_neither_steers_the_terminal_nor_is_taken_for_markup() -> None:
    nasty = "[bold red]x[/] [/nothing] \x1b]0;title\x07"
    proof = made_proof()
    environment = made_environment() | {"warnings": [nasty], "dataset": {"label": nasty, "sha256": nasty}}
    cells = tuple(replace(cell, category=nasty) if cell.category == "qa" else cell for cell in proof.speedup)
    text = printed(replace(proof, reasons=(nasty,), environment=environment, speedup=cells))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[bold red]x[/] [/nothing]") >= 4


@pytest.mark.parametrize(
    ("before", "after", "is_time", "words"),
    [
        (100.0, 80.0, True, "20 % shorter"),
        (100.0, 130.0, True, "30 % longer"),
        (10.0, 15.0, False, "50 % more"),
        (10.0, 9.0, False, "10 % less"),
        (10.0, 25.0, False, "2.5\u00d7 as much"),
        (10.0, 10.01, False, "the same"),
        (None, 10.0, False, "\u2013"),
        (0.0, 10.0, False, "\u2013"),
        (float("nan"), 10.0, True, "\u2013"),
    ],
)
def test_an_improvement_in_words(before: float | None, after: float | None, is_time: bool, words: str) -> None:
    assert improvement(before, after, is_time) == words


def test_each_arrival_rate_and_each_kind_of_work_is_named() -> None:
    proof = made_proof()
    opened = tuple(replace(arm, concurrency=0, rate_per_s=rate) for rate in (0.5, 2.0) for arm in proof.arms if arm.concurrency == 1)
    cells = tuple(replace(cell, work=Work.REPLAYED) for cell in proof.speedup)
    text = printed(replace(proof, arms=(*opened, *proof.arms), speedup=cells))
    assert [line.strip() for line in text.splitlines() if "arrivals/s" in line] == ["0.5 arrivals/s", "2 arrivals/s"]
    assert text.count("speed over equal work (replayed)") == 2
    assert "same tokens" not in text
