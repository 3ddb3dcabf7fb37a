"""The load test against a real server: fifty users, no errors, and a time per token from token counts."""

import csv
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningServer, serve

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "deploy" / "locust" / "locustfile.py"
NUM_USERS = 50


@pytest.fixture
def tiny_server(tmp_path: Path):
    """A model of a few thousand weights: the load is on the server, not on the arithmetic."""
    from tests.fakes.tiny_models import make_tiny_model

    folder = make_tiny_model(tmp_path / "model", "llama", vocab_size=320)
    shutil.copy(ROOT / "tests" / "data" / "templates" / "qwen2.5-coder.jinja", folder / "chat_template.jinja")
    with serve([str(folder), "--dtype", "float32", "--max-batch-size", "64"]) as server:
        yield server


def run_locust(server: RunningServer, prefix: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", server.url, "--csv", str(prefix), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=prefix.parent)


def test_fifty_users(tiny_server: RunningServer, tmp_path: Path) -> None:
    arguments = ("-u", str(NUM_USERS), "-r", "25", "-t", "15s", "--stop-timeout", "20", "--max-tokens", "16", "--think-s", "1")
    done = run_locust(tiny_server, tmp_path / "load", *arguments)
    assert done.returncode == 0, f"locust found failures or stopped: {done.stderr[-3000:]}"
    with (tmp_path / "load_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    for name in (("POST", "/infer"), ("POST", "/v1/chat/completions"), ("TOKEN", "chat: first token"), ("TOKEN", "chat: time per token")):
        assert int(rows[name]["Request Count"]) > NUM_USERS / 2, name
        assert int(rows[name]["Failure Count"]) == 0, name
    # The length column of the token lines holds tokens: far fewer than the bytes of a stream.
    assert 1 < float(rows["TOKEN", "chat: time per token"]["Average Content Size"]) <= 16
    assert float(rows["TOKEN", "chat: time per token"]["50%"]) < float(rows["POST", "/v1/chat/completions"]["50%"])
    assert "chat: time per token" in done.stdout + done.stderr, "the statistics are printed"
    assert tiny_server.metric("paceline_errors_total") == 0
    end_s = time.monotonic() + 5
    while tiny_server.metric("vllm:num_requests_running") and time.monotonic() < end_s:  # what the engine said up to 250 ms ago
        time.sleep(0.1)
    assert tiny_server.metric("vllm:num_requests_running") == 0


def test_a_failing_server_fails_the_load_test(tiny_server: RunningServer, tmp_path: Path) -> None:
    """More tokens than the context holds: every request is refused, and locust says so."""
    done = run_locust(tiny_server, tmp_path / "refused", "-u", "2", "-r", "2", "-t", "3s", "--max-tokens", "100000000")
    assert done.returncode == 1
    assert "HTTP 400" in done.stdout + done.stderr
