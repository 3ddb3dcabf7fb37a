"""What a decode step costs outside the native library: the engine process as it serves, with its scheduler, sockets and Python.

    python benchmarks/host_time.py [--model smollm2-135m-instruct] [--batch 1 8] [--temperature 0] [--draft none]

The engine runs as a child, as under `paceline serve`, with a clock around every call into the library; this process reads its tokens. A
step is the time from the end of one pass to the end of the next. Steps with prompts, and the first ones behind them, do not count.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from paired import append_result, environment
from tokenizers import Tokenizer

from paceline.config import EngineConfig
from paceline.core.progress import SilentProgress
from paceline.core.request import Request, SamplingParams
from paceline.engine.client import EngineClient
from paceline.engine.loop import main as run_engine
from paceline.engine.process import OPENMP_ENVIRONMENT, EngineProcess
from paceline.native.library import Batch, Library
from paceline.weights.resolve import resolve_models

RESULTS = Path(__file__).parent / "results" / "host-time.jsonl"
_PROMPT = Path(__file__).parent / "prompts" / "prose.txt"
_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS, _NUM_ROUNDS = 128, 128, 3
_NUM_FIRST_STEPS = 8  # behind a prompt: caches and counters settle
_MAX_STEP_TOKENS = 9  # per row: a pass with more has a prompt


@dataclass(frozen=True)
class Pass:
    """One call of the library's `run`."""

    num_rows: int
    num_tokens: int
    start_s: float
    end_s: float
    sampling_s: float  # in the library behind it, to choose tokens


class Clock:
    """Patched into the library's calls in the engine process."""

    def __init__(self) -> None:
        passes = self.passes = list[list[float]]()
        honest_run, honest_argmax, honest_contenders = Library.run, Library.argmax, Library.contenders

        def run(self: Library, pool: int, model: int, batch: Batch, *rest: Any) -> int:
            start_s = time.perf_counter()
            failure = honest_run(self, pool, model, batch, *rest)
            passes.append([batch.num_rows, batch.num_tokens, start_s, time.perf_counter(), 0.0])
            return failure

        def argmax(self: Library, logits: int, vocab_size: int) -> int | None:
            start_s = time.perf_counter()
            token_id = honest_argmax(self, logits, vocab_size)
            passes[-1][4] += time.perf_counter() - start_s
            return token_id

        def contenders(self: Library, logits: int, vocab_size: int, temperature: float, seed: int, index: int) -> list[int] | None:
            start_s = time.perf_counter()
            ids = honest_contenders(self, logits, vocab_size, temperature, seed, index)
            passes[-1][4] += time.perf_counter() - start_s
            return ids

        Library.run = run  # pyright: ignore[reportAttributeAccessIssue] - passes on what it does not read
        Library.argmax, Library.contenders = argmax, contenders


class ClockedProcess(EngineProcess):
    """The engine with the clock; it writes its passes to `log` when it ends."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def spawn(self, threads: int | None) -> None:
        environment = {**OPENMP_ENVIRONMENT, **os.environ}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, str(Path(__file__).resolve()), "--engine", str(self._log), str(self.directory), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0)


def serve(log: Path) -> None:
    """The child: `paceline.engine.loop` with the clock."""
    clock = Clock()
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    try:
        run_engine()
    finally:
        log.write_text(json.dumps(clock.passes))


async def generate(client: EngineClient, prompts: Sequence[Sequence[int]], sampling: SamplingParams, label: str) -> None:
    async def one(index: int, prompt: Sequence[int]) -> None:
        request = Request(f"{label}-{index}", tuple(prompt), sampling, time.monotonic())
        async for _ in client.submit(request):
            pass

    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


async def measure(config: EngineConfig, num_rows: int, temperature: float) -> list[Pass]:
    """All passes of the engine process."""
    target, _ = resolve_models(config, SilentProgress())
    text = Tokenizer.from_file(str(target.path / "tokenizer.json")).encode(_PROMPT.read_text(encoding="utf-8")).ids
    prompts = [text[7 * row : 7 * row + _NUM_PROMPT_TOKENS] for row in range(num_rows)]
    sampling = SamplingParams(_NUM_OUTPUT_TOKENS, temperature, seed=1, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "passes.json"
        client = await EngineClient.start(config, target.path, process=ClockedProcess(log))
        for index in range(_NUM_ROUNDS):
            await generate(client, prompts, sampling, str(index))
        await client.close()
        return [Pass(int(rows), int(tokens), *times) for rows, tokens, *times in json.loads(log.read_text())]


def steps(passes: Sequence[Pass], num_rows: int) -> list[tuple[float, float]]:
    """(Milliseconds outside the library, milliseconds in all) of each step that counts."""
    found: list[tuple[float, float]] = []
    num_behind = 0
    for before, after in pairwise(passes):
        is_decode = all(each.num_rows == num_rows and each.num_tokens <= _MAX_STEP_TOKENS * num_rows for each in (before, after))
        num_behind = num_behind + 1 if is_decode else 0
        if num_behind > _NUM_FIRST_STEPS:
            outside_s = after.start_s - before.end_s - before.sampling_s
            found.append((outside_s * 1e3, (after.end_s - before.end_s) * 1e3))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0])
    parser.add_argument("--draft", default="none")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    config = EngineConfig(model=args.model, draft=args.draft, threads=args.threads, measure_steps=False)
    for num_rows in args.batch:
        for temperature in args.temperature:
            times = steps(asyncio.run(measure(config, num_rows, temperature)), num_rows)
            if not times:
                raise SystemExit("no pass ran in the native library: this model or machine has no native step")
            outside_ms, step_ms = np.array(times).T
            share = float(outside_ms.sum() / step_ms.sum())
            row = {
                "benchmark": "host_time",
                "model": args.model,
                "draft": args.draft,
                "batch": num_rows,
                "temperature": temperature,
                "steps": len(step_ms),
                "outside_ms": round(float(np.median(outside_ms)), 3),
                "step_ms": round(float(np.median(step_ms)), 3),
                "share_outside": round(share, 4),
            }
            print(
                f"batch {num_rows}, temperature {temperature}: {row['outside_ms']} of {row['step_ms']} ms outside the library (medians), "
                f"{share:.1%} of all time in {len(step_ms)} steps"
            )
            append_result(RESULTS, {**row, **environment()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(Path(sys.argv[2]))
    else:
        main()
