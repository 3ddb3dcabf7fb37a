"""The examples run as a reader would run them, against a real server with the default model."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import RunningServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(*command: str, url: str) -> str:
    environment = {**os.environ, "PACELINE_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_client(real_server: RunningServer) -> None:
    printed = output_of(sys.executable, str(EXAMPLES / "openai_chat.py"), url=real_server.url)
    assert "Paris" in printed
    assert re.search(r"\[acceptance length \d+\.\d\d\]", printed)
    assert printed.lower().count("red, green, blue") >= 1


def test_a_predicted_output(real_server: RunningServer) -> None:
    printed = output_of(sys.executable, str(EXAMPLES / "predicted_output.py"), url=real_server.url)
    assert "Yours, Boris" in printed
    (accepted,) = re.findall(r"of those predicted (\d+) stood", printed)
    assert int(accepted) > 20


def test_curl(real_server: RunningServer) -> None:
    printed = output_of("bash", str(EXAMPLES / "curl.sh"), url=real_server.url)
    assert "Paris" in printed
    assert "data: [DONE]" in printed
    assert "vllm:spec_decode_num_draft_tokens_total" in printed


def test_offline(real_server: RunningServer) -> None:
    printed = output_of(sys.executable, str(EXAMPLES / "offline.py"), url=real_server.url)
    counts = [(int(fast), int(plain)) for fast, plain in re.findall(r"tokens in (\d+) steps, plainly in (\d+)", printed)]
    assert len(counts) == 2
    assert counts[1][0] < counts[1][1], "the answer that repeats its prompt takes fewer steps"
