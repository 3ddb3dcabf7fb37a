"""What HTTP costs: SmolLM2 with 8 requests at once, over a socket against the engine in this process. `python benchmarks/http_decode.py`

The same prompts and settings on both sides, in turn; the ratio is the served throughput as a share of the in-process one, with its 95 %
interval. Printed and appended to benchmarks/results/http.jsonl.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from paired import append_result, environment, run_pairs  # sets the served engine's OpenMP environment

from paceline.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.llm import LLM

RESULTS = Path(__file__).parent / "results" / "http.jsonl"
TEXT = Path(__file__).parent / "prompts" / "prose.txt"
MODEL = "smollm2-135m-instruct"
NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 64, 64
GOAL = 0.90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    llm = LLM(EngineConfig(model=MODEL))
    windows = batches(llm)
    other_windows = batches(llm)
    with served() as (port, server), ThreadPoolExecutor(NUM_REQUESTS) as pool:

        def over_http() -> float:
            prompts, started_s = next(windows), time.perf_counter()
            num_tokens = sum(pool.map(lambda prompt: stream(port, prompt), prompts))
            assert num_tokens == NUM_REQUESTS * NUM_OUTPUT_TOKENS, num_tokens
            return time.perf_counter() - started_s

        def in_process() -> float:
            prompts, started_s = next(other_windows), time.perf_counter()
            llm.generate(prompts, SamplingParams(NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True))
            return time.perf_counter() - started_s

        paired = run_pairs(over_http, in_process, arguments.pairs, lambda: cpu_s(server))
    ratio, low, high = paired.ratio()
    total = NUM_REQUESTS * NUM_OUTPUT_TOKENS
    figures = {
        "http_tok_s": round(total / statistics.median(paired.a_s), 1),
        "in_process_tok_s": round(total / statistics.median(paired.b_s), 1),
    }
    row = {"benchmark": "http_decode", "concurrency": NUM_REQUESTS, "ratio": round(ratio, 3), "ci95": [round(low, 3), round(high, 3)]}
    append_result(RESULTS, row | figures | {"num_pairs": arguments.pairs, "num_dropped": paired.num_dropped, **environment()})
    print(f"served throughput {ratio:.3f} [{low:.3f}, {high:.3f}] of the engine's own (goal {GOAL}); {figures}")


def batches(llm: LLM) -> Iterator[list[tuple[int, ...]]]:
    """Prompts that share no page with those before, in the same order on both sides."""
    text = llm.encode(TEXT.read_text())
    starts = itertools.count()
    while True:
        first = [next(starts) * 3 % (len(text) - NUM_PROMPT_TOKENS) for _ in range(NUM_REQUESTS)]
        yield [text[start : start + NUM_PROMPT_TOKENS] for start in first]


@contextlib.contextmanager
def served() -> Iterator[tuple[int, psutil.Process]]:
    """`paceline serve` on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "paceline.cli", "serve", MODEL, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            assert server.poll() is None, "the server ended while starting"
            time.sleep(0.2)
        yield port, psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def cpu_s(server: psutil.Process) -> float:
    """CPU seconds of the server and its children so far."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError):
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    return False


def stream(port: int, prompt: tuple[int, ...]) -> int:
    """Reads one streamed completion; returns the output tokens that its usage counts."""
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    usage = None
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:])["usage"] or usage
    connection.close()
    assert usage is not None, "the stream ended without usage"
    return usage["completion_tokens"]


if __name__ == "__main__":
    main()
