"""`paceline prove` as a command: its flags, its exit codes, its server, and that it needs no torch."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli import child_server, prove_main
from paceline.cli import prove as prove_module
from paceline.cli.main import run
from paceline.cli.prove import time_text
from paceline.errors import MissingError
from paceline.prove import run as run_module
from paceline.prove.options import ProveConfig
from paceline.prove.results import Verdict
from paceline.prove.run import Job, Outcome
from tests.fakes.made_proof import made_proof
from tests.fakes.made_records import made_dataset, made_measurement

MEASUREMENT = made_measurement(made_dataset())


def outcome(verdict: Verdict) -> Outcome:
    return Outcome(made_proof(verdict), MEASUREMENT, made_dataset())


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """In the place of a measurement: what was asked for is kept, and a proof comes back."""
    asked: list[Job] = []

    async def prove(job: Job, tell: run_module.Tell) -> Outcome:
        asked.append(job)
        tell("concurrency 1, block 1 of 8, baseline", 3, 10, 90.0)
        return outcome(Verdict.PASS)

    monkeypatch.setattr(run_module, "prove", prove)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_proof_is_printed_and_written(jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prove", "--url", "http://127.0.0.1:1", "--quick", "--json", "out.json", "--html", "out.html", "--save-result", "saved"]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert "PASS: " in captured.out
    assert "not SPEED-Bench" in captured.out
    assert "concurrency 1, block 1 of 8, baseline: 3 of 10, 1 min 30 s left" in captured.err
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "PASS"
    assert "<svg" in (tmp_path / "out.html").read_text()
    assert (tmp_path / "saved/speed-bench/baseline-concurrency1/timing.json").exists()
    assert len(jobs[0].dataset.prompts) > 22
    assert sum(len(prompt.turns) for prompt in jobs[0].dataset.prompts) == 44


@pytest.mark.parametrize("verdict", list(Verdict))
def test_each_verdict_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    monkeypatch.setattr(run_module, "judge_again", lambda path, criteria, objectives: outcome(verdict))
    code = {"PASS": 0, "FAIL": 1, "INVALID": 4, "INCONCLUSIVE": 5}[verdict.value]
    assert run(["prove", "--from-records", "x.jsonl"]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurency", "3"], "Did you mean --concurrency"),
        (["--concurrency", "three", "--url", "u"], "--concurrency three"),
        (["--url", "u", "--draft", "ngram"], "--draft"),
        (["--url", "u", "--data", "no/such/folder"], "no/such/folder"),
        (["--from-records", "no.jsonl"], "no.jsonl"),
        (["--url", "u", "--split", "throughput_9k"], "throughput_9k"),
        (["--soak", "soon"], "soon"),
        (["--url", "u", "--goodput", "itl:5"], "'itl:5' is no objective"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(["prove", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("paceline: ")


def test_no_server_there_is_exit_code_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["prove", "--url", "http://127.0.0.1:9", "--quick", "--records", str(tmp_path / "a")]) == 3
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_the_key_for_another_server_is_no_key_of_ours(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prove", "--url", "u", "--api-key", "k"]) == 0
    assert jobs[-1].config.api_key == "k"
    assert run(["serve", "--api-key", "k"]) == 2
    monkeypatch.setenv("PACELINE_API_KEY", "from-the-environment")
    monkeypatch.setenv("PACELINE_URL", "http://127.0.0.1:7")
    assert run(["prove"]) == 0
    assert (jobs[-1].config.api_key, jobs[-1].url) == ("from-the-environment", "http://127.0.0.1:7")
    assert run(["config", "show"]) == 2
    assert "PACELINE_API_KEY" in capsys.readouterr().err


def test_a_server_is_started_with_the_flags_it_needs_and_ended(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextmanager
    def running(arguments: list[str], show: object, merges_errors: bool, is_stopped: Event | None) -> Generator[child_server.ChildServer]:
        events.append(arguments)
        try:
            yield child_server.ChildServer("http://127.0.0.1:5", 77)
        finally:
            events.append("ended")

    monkeypatch.setattr(child_server, "running_server", running)
    assert run(["prove", "--model", "some/model", "--draft", "ngram"]) == 0
    assert events == [["some/model", "--port=0", "--draft=ngram"], "ended"]
    assert (jobs[-1].url, jobs[-1].pid, jobs[-1].criteria) == ("http://127.0.0.1:5", 77, "cpu")
    start = jobs[-1].drafting_server
    assert start is not None, "the certificate is of a server that drafts wherever it can"
    with start(Event()) as url:
        assert url == "http://127.0.0.1:5"
    assert events[2:] == [["some/model", "--port=0", "--draft=ngram", "--speculation=on"], "ended"]
    assert run(["prove", "--url", "http://127.0.0.1:7"]) == 0
    assert jobs[-1].drafting_server is None


def test_a_start_in_another_thread_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is ended with it, long before it would have been ready."""
    program = "import time; print('loading', flush=True); time.sleep(600)"
    started: list[subprocess.Popen[str]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", program], **options))
        return started[-1]

    monkeypatch.setattr(child_server, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    is_stopped, errors = Event(), list[Exception]()

    def start() -> None:
        try:
            with child_server.running_server([], lambda line: is_stopped.set(), is_stopped=is_stopped):
                pass
        except MissingError as error:
            errors.append(error)

    thread = Thread(target=start)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the server was stopped before it was ready"]
    assert started[0].poll() is not None


def test_the_log_of_a_server_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--model", "no-such-model"]) == 2
    printed = capsys.readouterr().err
    assert "no-such-model" in printed
    assert "the server's last words" in printed


def test_a_missing_package_shows_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_module, "find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(MissingError, match=r"matplotlib.*paceline\[prove\]"):
        prove_module.prove(config=ProveConfig(url="u", html=Path("x.html")))


def test_what_cannot_be_written_says_that_the_records_stay(jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "saved").write_text("in the way")
    assert run(["prove", "--url", "u", "--save-result", "saved"]) == 3
    assert "--from-records" in capsys.readouterr().err


def test_it_runs_where_there_is_no_torch_and_no_server() -> None:
    """Every module of `prove`, and the referee's own command."""
    program = """
import sys
for name in ("torch", "fastapi", "starlette", "uvicorn", "zmq", "tokenizers", "paceline.engine", "paceline.server", "paceline.core"):
    sys.modules[name] = None
import importlib, pkgutil, paceline.prove
for module in pkgutil.walk_packages(paceline.prove.__path__, "paceline.prove."):
    importlib.import_module(module.name)
from paceline.cli.prove_main import run
print(run(["--version"]), run(["--nonsense"]), run(["--url", "http://127.0.0.1:9", "--concurrency", "x"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 2 2"


def test_the_referee_alone_has_no_server_to_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prove_module, "find_spec", lambda name: None if name.endswith(".engine") else object())
    assert prove_main.run(["--quick"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7500, "2 h 05 min")]
)
def test_times_as_people_read_them(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_the_bar_shows_the_time_left_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with prove_module._Bar() as bar:
        bar.update("concurrency 4, block 2 of 8, speculative", 30, 120, 125.0)
        bar._progress.refresh()  # type: ignore[union-attr]
    assert "30/120" in stream.getvalue()
    assert "2 min 05 s left" in stream.getvalue()


def test_without_a_terminal_a_long_stage_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 30.0, 31.0])
    monkeypatch.setattr("paceline.cli.prove.time.monotonic", lambda: next(clock))
    with prove_module._Bar() as bar:
        for num_done in (1, 2, 31, 32):
            bar.update("certificate, laws", num_done, 61, None)
    assert capsys.readouterr().err.splitlines() == ["certificate, laws: 1 of 61", "certificate, laws: 31 of 61, 30 s left"]
