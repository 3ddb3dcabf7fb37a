"""The pool of threads under stress, alone and beside a busy process, and proof that the stress finds a mistake."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.native.library import Library
from tests.fakes.pool_stress import build, mistaken, source, stress


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pool"), source())


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_task_once_and_in_order(program: Path, num_threads: int) -> None:
    assert stress(program, num_threads, 200, seed=num_threads) == (0, "")


@pytest.fixture
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def test_beside_a_busy_process(program: Path, busy_process: None) -> None:
    assert stress(program, 2, 100) == (0, "")


def test_a_caller_that_sleeps_is_woken_for_tasks_of_its_run(tmp_path: Path, program: Path) -> None:
    assert stress(program, 2, 0) == (0, "")
    right = "if (atomic_load(&pool->is_caller_sleeping)"
    program = build(tmp_path, mistaken(right, right.replace("(a", "((num_tasks == 0 && a") + ")"))
    assert stress(program, 2, 0, limit_s=1)[0] != 0


def test_a_mistake_is_found(tmp_path: Path) -> None:
    # The next phase begins while tasks of this one are in hand.
    program = build(tmp_path, mistaken("+ num_run < num_tasks)", "+ num_run < num_tasks / 2)"))
    assert stress(program, 3, 300, limit_s=10) != (0, "")


def test_workers_sleep_outside_a_run(library: Library) -> None:
    pool = library.pool_new(4)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    library.pool_free(pool)
