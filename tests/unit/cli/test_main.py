"""The entry point: quick, one line per error, and the right exit code."""

import errno
import re
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli import show as show_module
from paceline.cli.main import run
from paceline.cli.outcome import explain
from paceline.errors import BadInputError, EngineDeadError, MissingError, NotFoundError, PacelineError

VERBS = ("serve", "generate", "chat", "prove", "models", "doctor", "config")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["prove", "--help"], ["config", "show"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    heavy = "torch numpy fastapi pydantic uvicorn tokenizers zmq msgspec rich.progress"
    program = f"import sys; from paceline.cli.main import run; code = run({arguments}); "
    program += f"print([name for name in {heavy.split()} if name in sys.modules], code)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^│ {verb}\b", printed, re.MULTILINE) for verb in VERBS)
    assert run([]) == 0


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline.cli", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInputError("bad"), 2),
        (NotFoundError("no such"), 2),
        (MissingError("lacks"), 3),
        (EngineDeadError("dead"), 3),
        (PacelineError("failed"), 1),
    ],
)
def test_our_errors_speak_for_themselves(error: PacelineError, code: int) -> None:
    assert explain(error) == (str(error), code)


def test_a_full_disk_says_so_and_a_fault_of_ours_says_how_to_see_more() -> None:
    message, code = explain(OSError(errno.ENOSPC, "No space left on device", "/x/y"))
    assert code == 3
    assert "/x/y" in message
    assert "PACELINE_CACHE" in message
    message, code = explain(ValueError("oops"))
    assert code == 1
    assert "ValueError: oops" in message
    assert "PACELINE_DEBUG" in message


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_one_line_and_a_trace_only_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    def fail() -> dict[str, object]:
        raise MissingError("lacks\nsomething")

    monkeypatch.setattr(show_module, "schema", fail)
    if debug:
        monkeypatch.setenv("PACELINE_DEBUG", "1")
    assert run(["config", "schema"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "paceline: lacks something"
    assert ("Traceback" in lines[0]) is debug
    assert (len(lines) == 1) is not debug


def test_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(show_module, "schema", interrupt)
    assert run(["config", "schema"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m paceline.cli config schema | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
