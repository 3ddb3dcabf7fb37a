"""Paceline beside llama.cpp's Python server on the same prompts, each plainly and with prompt lookup. `-h` lists the flags.

Both sides are measured by `paceline prove`, one after the other with nothing else running. The table for docs/comparison.md is printed;
both proofs are kept as JSON, and a line is appended to benchmarks/results/llama_cpp.jsonl.

llama-cpp-python lives in an environment of its own (it builds llama.cpp, some minutes): pip install 'llama-cpp-python[server]'
"""

import argparse
import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "llama_cpp.jsonl"
DRAFT_LENGTH = 5  # Paceline's default
START_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True, help="the interpreter of the environment that has llama-cpp-python")
    parser.add_argument(
        "--gguf", required=True, type=Path, help="the model file; for a fair table the one that Paceline's model was made from"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="Paceline's name of the same model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--num-prompts", type=int, default=4, help="requests per category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--category", default="", help="only these categories, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the proofs")
    arguments = parser.parse_args()
    flags = ["--concurrency", arguments.concurrency, "--num-prompts", str(arguments.num_prompts), "--max-tokens", str(arguments.max_tokens)]
    flags += ["--category", arguments.category] if arguments.category else []
    ours = prove([*flags, "--model", arguments.model], arguments.out / "prove-paceline.json")
    plain, drafting = free_port(), free_port()
    lookup = ["--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", str(DRAFT_LENGTH)]
    with llama_server(arguments, plain, []) as plain_url, llama_server(arguments, drafting, lookup) as drafting_url:
        theirs = prove([*flags, "--url", drafting_url, "--baseline-url", plain_url], arguments.out / "prove-llama-cpp.json")
    rows = [*rows_of("Paceline", ours), *rows_of("llama-cpp-python", theirs)]
    print("\n".join(table(rows)))
    with RESULTS.open("a") as file:
        file.write(json.dumps({"date": date.today().isoformat(), "command": shlex.join(sys.argv), "rows": rows}) + "\n")


def prove(flags: list[str], path: Path) -> dict[str, object]:
    """One proof as its JSON; any verdict will do, for the table is about figures."""
    path.with_suffix(".records.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "paceline.cli", "prove", *flags, "--json", str(path)]
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode not in (0, 1, 4, 5):
        sys.exit(f"prove ended with status {done.returncode}")
    return json.loads(path.read_text())


@contextlib.contextmanager
def llama_server(arguments: argparse.Namespace, port: int, more: list[str]) -> Iterator[str]:
    """`python -m llama_cpp.server`. By default a new request ends the one that runs: interrupt_requests switches that off."""
    command = [arguments.llama_python, "-m", "llama_cpp.server", "--model", str(arguments.gguf), "--port", str(port)]
    command += ["--n_threads", str(arguments.threads), "--n_threads_batch", str(arguments.threads), "--n_ctx", "8192"]
    command += ["--interrupt_requests", "false", "--verbose", "false", *more]
    print(shlex.join(command), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit("the llama.cpp server did not start; run its command by hand to see why")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rows_of(server: str, proof: dict) -> list[dict[str, object]]:
    """One row for each arm at each concurrency, over all categories."""
    ratios = {cell["concurrency"]: cell for cell in proof["speedup"] if cell["category"] == "overall"}
    rows: list[dict[str, object]] = []
    for arm in proof["arms"]:
        if arm["category"] != "overall":
            continue
        is_drafting = arm["arm"] == "speculative"
        ratio = ratios.get(arm["concurrency"]) if is_drafting else None
        rows.append(
            {
                "server": server,
                "decoding": "prompt lookup" if is_drafting else "plain",
                "concurrency": arm["concurrency"],
                "ttft_ms": (arm["ttft_ms"] or {}).get("p50"),
                "tpot_ms": (arm["tpot_ms"] or {}).get("p50"),
                "user_tps": arm["user_tps"],
                "output_tps": arm["output_tps"],
                "mean_output_tokens": arm["mean_output_tokens"],
                "num_errors": arm["num_errors"],
                "num_requests": arm["num_requests"],
                "speedup": None if ratio is None else ratio["ratio"],
                "ci95": None if ratio is None else ratio["ci95"],
            }
        )
    return sorted(rows, key=lambda row: (row["concurrency"], row["decoding"]))


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """Markdown."""
    heads = ("server", "decoding", "conc.", "first token p50 (ms)", "token p50 (ms)", "tokens/s per user", "tokens/s in all", "speed-up")
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        figures = [shown(row[name]) for name in ("ttft_ms", "tpot_ms", "user_tps", "output_tps")]
        ratio, ci95 = row["speedup"], row["ci95"]
        against = f"{ratio:.2f}x ({ci95[0]:.2f} to {ci95[1]:.2f})" if isinstance(ratio, float) and isinstance(ci95, list) else ""
        yield f"| {row['server']} | {row['decoding']} | {row['concurrency']} | {' | '.join(figures)} | {against} |"


def shown(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, int | float) else "-"


if __name__ == "__main__":
    main()
