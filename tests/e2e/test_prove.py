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

from tests.e2e.conftest import serve

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


def answers(path: Path, phase: str) -> dict[str, dict[tuple[int, int, str, int], dict]]:
    """Requests of a phase in a file of raw records, by arm, then by what makes two of them twins."""
    found: dict[str, dict[tuple[int, int, str, int], dict]] = {"baseline": {}, "speculative": {}}
    for line in path.read_text().splitlines():
        record = json.loads(line).get("request")
        if record is not None and record["phase"] == phase:
            found[record["arm"]][record["concurrency"], record["block"], record["question_id"], record["turn"]] = record
    return found


def test_two_servers_that_sample_differently_are_given_equal_work(tiny_folder: Path, tmp_path: Path) -> None:
    """One drafts under the rule that draws other samples of the same law; and the recording is played again in a second proof."""
    settings = [str(tiny_folder), "--dtype", "float32", "--kv-cache-memory-bytes", "8000000", "--threads", "1"]
    drafting = [*settings, "--draft", "ngram", "--speculation", "on", "--verification", "ratio"]
    topics = (
        "bread",
        "rivers",
        "bicycles",
        "bridges",
        "maps",
        "winter",
        "bees",
        "clocks",
        "sleep",
        "salt",
        "glass",
        "wind",
        "paper",
        "tea",
    )
    prompts = [{"prompt": f"Say in one sentence why people care about {topic}, and who does not."} for topic in topics]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with serve(drafting) as fast, serve([*settings, "--draft", "none"]) as plain:
        base = [sys.executable, "-m", "paceline.cli", "prove", "--url", fast.url, "--baseline-url", plain.url, "--data", "short.jsonl"]
        base += ["--concurrency", "1", "--max-tokens", "48", "--temperature", "1.0", "--num-blocks", "2"]
        for more in (["--json", "first.json"], ["--json", "second.json", "--replay", "first.records.jsonl"]):
            done = subprocess.run([*base, *more], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    recorded = {key[2:]: record for key, record in answers(tmp_path / "first.records.jsonl", "record")["baseline"].items()}
    lengths = {record["num_output_tokens"] for record in recorded.values()}
    assert len(lengths) > 1, "some end by themselves, which replay must not let them"
    for name in ("first", "second"):
        sides = answers(tmp_path / f"{name}.records.jsonl", "measure")
        assert sides["baseline"].keys() == sides["speculative"].keys()
        for key, one in sides["baseline"].items():
            other = sides["speculative"][key]
            assert one["num_output_tokens"] == other["num_output_tokens"] == recorded[key[2:]]["num_output_tokens"]
            assert one["num_prompt_tokens"] == other["num_prompt_tokens"]
        assert any(one["text"] != sides["speculative"][key]["text"] for key, one in sides["baseline"].items())
        document = json.loads((tmp_path / f"{name}.json").read_text())
        assert {cell["work"] for cell in document["speedup"]} == {"replayed"}
        assert any("recorded once and replayed" in reason for reason in document["reasons"])
    assert not answers(tmp_path / "second.records.jsonl", "record")["baseline"], "nothing is recorded anew"
