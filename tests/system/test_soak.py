"""Three minutes of traffic on the default model: nothing leaks, nothing fails. The long soak is the same command with 72h."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import DEFAULT_MODEL, serve

pytestmark = pytest.mark.system


def test_three_minutes() -> None:
    with serve([DEFAULT_MODEL]) as server:
        command = [sys.executable, "-m", "paceline.cli", "prove", "--soak", "3m", "--url", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    for name in ("rss_mib", "num_fds", "num_free_pages"):
        assert name in done.stdout, "it was watched"
