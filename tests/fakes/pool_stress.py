"""Builds and runs pool_stress.c with threads.c as it is, or with a mistake in it."""

import subprocess
from pathlib import Path

import pytest

from paceline.native.compile import FLAGS, FOLDER, find_compiler

DRIVER = Path(__file__).with_suffix(".c")
LIMIT_S = 60


def source() -> str:
    return (FOLDER / "threads.c").read_text(encoding="utf-8")


def mistaken(right: str, wrong: str) -> str:
    """threads.c with every `right` replaced."""
    assert right in source()
    return source().replace(right, wrong)


def build(folder: Path, threads: str, *flags: str) -> Path:
    """The stress program with `threads` as threads.c; the test is skipped without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    folder.mkdir(exist_ok=True)
    path = folder / "threads.c"
    path.write_text(threads, encoding="utf-8")
    program = folder / "stress"
    subprocess.run([*compiler, *FLAGS, *flags, f"-I{FOLDER}", str(DRIVER), str(path), "-o", str(program)], check=True, timeout=LIMIT_S)
    return program


def stress(program: Path, num_threads: int, num_runs: int, seed: int = 1, limit_s: int = LIMIT_S) -> tuple[int, str]:
    """Exit status and output; a program that hangs is ended by a signal after `limit_s`."""
    command = [str(program), str(num_threads), str(num_runs), str(seed), str(limit_s)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * limit_s)
    return done.returncode, done.stdout
