"""Mistakes planted in a pass in C: the unit tests that state its law must notice each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.native.compile import compile_library, find_compiler
from tests.system.test_native import ROOT, mutated

pytestmark = pytest.mark.system

LIMIT_S = 300
MISTAKES = {
    "later keys are seen": ("attend.h", "visible < count ? (int32_t)visible : count", "count"),
    "splits are merged in another order when they are tasks": (
        "attention.c",
        "for (int32_t split = 1; split < one->num_splits; split++)",
        "for (int32_t split = one->num_splits - 1; split > 0; split--)",
    ),
    "a token's angle depends on the pass": ("stages.c", "(float)model->batch->positions[t]", "(float)t"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, name: str) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    library = tmp_path / "mistaken.so"
    assert compile_library(library, sources=mutated(tmp_path, *MISTAKES[name])) is None
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "tests/unit/native/test_step.py"]
    environment = {**os.environ, "PACELINE_TEST_NATIVE": str(library)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
