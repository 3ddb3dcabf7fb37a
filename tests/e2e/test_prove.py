"""`paceline prove` with a server of its own, stopped by Ctrl-C in the midst: a report of what there is, and nothing left running."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system

LIMIT_S = 240.0


def started_by(folder: Path) -> list[psutil.Process]:
    """Servers and engines of the model in `folder`, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or []) and "serve" in process.info["cmdline"]:
            found += [process, *process.children(recursive=True)]
    return found


def test_ctrl_c_in_a_proof_keeps_what_was_measured_and_ends_its_server(tiny_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "paceline.cli", "prove", "--model", str(tiny_folder), "--category", "qa", "--num-prompts", "4"]
    command += ["--concurrency", "2", "--max-tokens", "16", "--num-blocks", "200", "--json", "out.json", "--html", "out.html"]
    environment = {**os.environ, "PACELINE_DTYPE": "float32", "PACELINE_KV_CACHE_MEMORY_BYTES": "8000000", "PACELINE_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        end_s = time.monotonic() + LIMIT_S
        while "block 3 of 200" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        servers = started_by(tiny_folder)
        assert len(servers) >= 2, "the server and its engine"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 5, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not [server for server in servers if server.is_running() and server.status() != psutil.STATUS_ZOMBIE]
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["verdict"] == "INCONCLUSIVE"
    assert "stopped before its end" in document["reasons"][0]
    assert {arm["arm"] for arm in document["arms"]} == {"baseline", "speculative"}
    assert document["environment"]["device"] == "cpu"
    assert document["environment"]["utilisation"], "its own server's processes can be seen"
    assert "<svg" in (tmp_path / "out.html").read_text()
    assert (tmp_path / "out.records.jsonl").stat().st_size > 1000
