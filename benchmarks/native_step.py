"""The native step alone, on random weights of a real model's shape: milliseconds per pass and op, prompts, and a busy neighbour.

    python benchmarks/native_step.py [--shape smollm2-135m] [--format w4] [--threads 2] [--keys 150] [--busy]

Medians and the fastest pass; `--busy` runs a process that takes one core all the time beside it and prints what is left of the speed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.native.library import Format, Library, load
from tests.fakes.native_model import Model, PackedMatrix, Row, Spec, run
from tests.fakes.packed import aligned, native_matrix

SHAPES = {
    "smollm2-135m": Spec(30, 576, 1536, 9, 3, 64, 49152),
    "qwen2.5-0.5b": Spec(24, 896, 4864, 14, 2, 64, 151936, has_bias=True),
    "qwen2.5-1.5b": Spec(28, 1536, 8960, 12, 2, 128, 151936, has_bias=True),
    "qwen3-0.6b": Spec(28, 1024, 3072, 16, 8, 128, 151936, has_head_norm=True),
}
OPS = ("embed", "qkv", "attention", "out", "gate_up", "down", "head")
PAGE_SIZE = 16
PROMPT = 512
Times = NDArray[np.float64]


def weight_bytes(library: Library, spec: Spec, format: Format) -> int:
    qkv_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    matrices = [(qkv_rows, spec.hidden), (spec.hidden, spec.num_heads * spec.head_dim), (spec.hidden, spec.intermediate)]
    matrices += [(spec.intermediate, spec.hidden)] * 2
    layer = sum(library.packed_bytes(format, rows, k) for rows, k in matrices)
    return spec.num_layers * layer + library.packed_bytes(format, spec.vocab, spec.hidden)


class RepeatedMatrix(PackedMatrix):
    """One random tile over and over: large matrices in no time, and as much memory to read."""

    def __init__(self, library: Library, rng: np.random.Generator, rows: int, k: int, format: Format, has_bias: bool = False) -> None:
        super().__init__(library, rng, 16, k, format, has_bias)
        tile = self.packed
        self.packed = aligned(library.packed_bytes(format, rows, k))
        self.packed.reshape(-1, tile.shape[0])[:] = tile
        self.bias = np.zeros(rows, np.float32)
        self.matrix = native_matrix(self.weights, self.packed)
        self.matrix.rows = rows
        self.matrix.bias = self.bias.ctypes.data if has_bias else 0


class Bench:
    """A model with KV of `num_keys` tokens, and passes on it."""

    def __init__(self, library: Library, spec: Spec, num_keys: int) -> None:
        self.model = Model(library, spec, max_tokens=PROMPT, matrix=RepeatedMatrix)
        num_pages = -(-(max(num_keys, PROMPT) + 64) // PAGE_SIZE)
        self.pages = list(range(num_pages))
        self.kv = self.model.kv(num_pages * PAGE_SIZE)
        self.kv[:] = 0.01
        self.num_keys = num_keys

    def times_ms(self, pool: int, num_tokens: int, seconds: float) -> tuple[list[float], Times]:
        """Wall-clock times of passes that verify `num_tokens`, and the mean profile of ops."""
        row = Row([7] * num_tokens, self.num_keys, self.pages, num_tokens)
        times: list[float] = []
        profile = np.zeros(len(OPS))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 5:
            before = time.perf_counter()
            result = run(self.model, pool, [row], self.kv, PAGE_SIZE, wants_hidden=False)
            times.append((time.perf_counter() - before) * 1e3)
            profile += result.profile_ns / 1e6
        return times, profile / len(times)

    def prompt_ms(self, pool: int) -> tuple[float, Times]:
        row = Row([7] * PROMPT, 0, self.pages, 1)
        results = []
        for _ in range(3):
            before = time.perf_counter()
            result = run(self.model, pool, [row], self.kv, PAGE_SIZE, wants_hidden=False)
            results.append(((time.perf_counter() - before) * 1e3, result.profile_ns / 1e6))
        return min(results, key=lambda pair: pair[0])


def line(label: str, ms: float, best: float, profile: Times) -> str:
    parts = "  ".join(f"{name} {value:.2f}" for name, value in zip(OPS, profile, strict=True))
    return f"{label:<24} median {ms:8.2f} ms  best {best:8.2f}   ops (mean, {profile.sum():.2f}): {parts}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--format", choices=("w4", "w8"), default="w4")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keys", type=int, default=150)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", action="store_true", help="only: one token, alone and beside a busy process, in turns")
    args = parser.parse_args(argv)
    library = load()
    if isinstance(library, str):
        raise SystemExit(library)
    shape = SHAPES[args.shape]
    format = Format.W4 if args.format == "w4" else Format.W8
    spec = Spec(*(getattr(shape, name) if name != "format" else format for name in shape.__slots__))
    bench = Bench(library, spec, args.keys)
    size = weight_bytes(library, spec, format)
    print(f"{args.shape} {args.format}, {library.variant}, {args.threads} threads, {args.keys} keys, {size / 1e6:.1f} MB of weights")
    pool = library.pool_new(args.threads)
    if args.busy:
        measure_busy(bench, pool, args.seconds)
        return
    for num_tokens in args.tokens:
        times, profile = bench.times_ms(pool, num_tokens, args.seconds)
        median = float(np.median(times))
        print(line(f"{num_tokens} tokens", median, min(times), profile), f"  {size / median / 1e6:.1f} GB/s")
    ms, profile = bench.prompt_ms(pool)
    print(line(f"prompt of {PROMPT}", ms, ms, profile), f"  {PROMPT / ms * 1e3:.0f} tokens/s")


def measure_busy(bench: Bench, pool: int, seconds: float) -> None:
    """Tokens per second alone and beside a process that never sleeps, three rounds in turns."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for is_busy in (False, True):
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
            try:
                time.sleep(0.3)
                times, _ = bench.times_ms(pool, 1, seconds)
            finally:
                if neighbour:
                    neighbour.kill()
                    neighbour.wait()
            rates[is_busy].append(len(times) / sum(times) * 1e3)
            label, median, slow = "busy" if is_busy else "idle", np.median(times), np.percentile(times, 99)
            print(f"{label}  {rates[is_busy][-1]:7.1f} tokens/s  median {median:.2f} ms  99 % below {slow:.2f} ms")
    print(f"share kept: {np.median(rates[True]) / np.median(rates[False]):.2f}")


if __name__ == "__main__":
    main()
