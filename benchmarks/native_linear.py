"""The native products alone: all matrices of SmolLM2-135M, by format, tokens and threads: `python benchmarks/native_linear.py`.

Rows of equal length are one matrix here, so that two calls are one token's worth and what is timed is the products (with the quantisation
of their inputs), not calls. Beside each row stands how fast this machine read memory in the same minute. Results are printed and appended
to benchmarks/results/native-linear.jsonl with machine, versions and commit.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from paired import append_result, environment

from paceline.executor.bandwidth import read_bandwidth
from paceline.native.library import DATA_ALIGNMENT, GROUP, Format, Library, Matrix, load

RESULTS = Path(__file__).parent / "results" / "native-linear.jsonl"
NUM_LAYERS = 30
# Rows by k: q, k and v, out, gate and up of every layer, and the head; then down.
ROWS = {576: NUM_LAYERS * (960 + 576 + 3072) + 49152, 1536: NUM_LAYERS * 576}
TOKENS = (1, 2, 4, 8, 64)
MIN_S = 0.05  # of one timing, by repetition


def random_matrix(library: Library, format: Format, rows: int, k: int) -> tuple[Matrix, NDArray[np.uint8]]:
    """A packed matrix of random elements, and the memory that it lies in."""
    rng = np.random.default_rng(k)
    top = 16 if format == Format.W4 else 255
    elements = rng.integers(0, top, (rows, k), dtype=np.uint8)
    if format == Format.W8:
        elements -= np.uint8(127)  # -127..127 in two's complement
    scales, minima = rng.uniform(0.01, 0.02, (2, rows, k // GROUP)).astype(np.float16)
    num_bytes = library.packed_bytes(format, rows, k)
    memory = np.zeros(num_bytes + DATA_ALIGNMENT, dtype=np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % DATA_ALIGNMENT
    library.pack(format, rows, k, elements.ctypes.data, scales.ctypes.data, minima.ctypes.data if format == Format.W4 else 0, address)
    return Matrix(address, 0, rows, k, format, 0), memory


def pass_ms(library: Library, pool: int, matrices: list[Matrix], num_tokens: int) -> float:
    """Milliseconds for all matrices against `num_tokens` rows."""
    inputs = [np.random.default_rng(0).normal(size=(num_tokens, matrix.k)).astype(np.float32) for matrix in matrices]
    outputs = [np.empty((num_tokens, matrix.rows), dtype=np.float32) for matrix in matrices]
    num_passes = 0
    started_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < MIN_S:
        for matrix, x, out in zip(matrices, inputs, outputs, strict=True):
            assert library.linear(pool, matrix, x.ctypes.data, num_tokens, out.ctypes.data) == 0
        num_passes += 1
    return elapsed_s * 1e3 / num_passes


def measure(library: Library, format: Format, num_threads: int, num_rounds: int) -> list[dict[str, object]]:
    torch.set_num_threads(num_threads)
    packed = [random_matrix(library, format, rows, k) for k, rows in ROWS.items()]
    matrices = [matrix for matrix, _ in packed]
    num_bytes = sum(library.packed_bytes(format, matrix.rows, matrix.k) for matrix in matrices)
    pool = library.pool_new(num_threads)
    times_ms: dict[int, list[float]] = {num_tokens: [] for num_tokens in TOKENS}
    bandwidths: list[float] = []
    for _ in range(num_rounds):
        for num_tokens in TOKENS:
            bandwidths.append(read_bandwidth.__wrapped__(num_threads))
            times_ms[num_tokens].append(pass_ms(library, pool, matrices, num_tokens))
    library.pool_free(pool)
    bandwidth = statistics.median(bandwidths)
    return [
        {
            "format": format.name,
            "threads": num_threads,
            "tokens": num_tokens,
            "ms": round(statistics.median(taken), 3),
            "best_ms": round(min(taken), 3),
            "gb_s": round(num_bytes / statistics.median(taken) / 1e6, 2),
            "read_gb_s": round(bandwidth / 1e9, 2),
            "read_gb_s_range": [round(min(bandwidths) / 1e9, 2), round(max(bandwidths) / 1e9, 2)],
            "gmac_s": round(sum(matrix.rows * matrix.k for matrix in matrices) * num_tokens / statistics.median(taken) / 1e6, 1),
        }
        for num_tokens, taken in times_ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--variant", help="an instruction set instead of the best one")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    arguments = parser.parse_args()
    library = load()
    if isinstance(library, str):
        raise SystemExit(library)
    if arguments.variant and not library.force_variant(arguments.variant):
        raise SystemExit(f"this processor or build has no {arguments.variant}")
    for format in (Format.W4, Format.W8):
        for num_threads in arguments.threads:
            for row in measure(library, format, num_threads, arguments.rounds):
                print(json.dumps(row), flush=True)
                if not arguments.dry_run:
                    append_result(RESULTS, {"variant": library.variant, **row, **environment(), "threads": num_threads})


if __name__ == "__main__":
    main()
