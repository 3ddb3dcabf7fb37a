"""Paired timing for benchmarks: two arms in turn in one process, the ratio of their medians with a 95 % bootstrap interval.

Runs in which other processes took more than a tenth of the machine are dropped and repeated, so a busy neighbour cannot make a claim.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.engine.process import OPENMP_ENVIRONMENT

os.environ.update(OPENMP_ENVIRONMENT)  # before torch is loaded: both arms wait at barriers as the served engine does

_MAX_FOREIGN_SHARE = 0.10
_NUM_BOOTSTRAP = 10_000


@dataclass(frozen=True)
class Paired:
    """Seconds of each kept pair, A and B; `num_dropped` pairs lost their cores to other processes."""

    a_s: list[float]
    b_s: list[float]
    num_dropped: int

    def ratio(self) -> tuple[float, float, float]:
        """Median(B) / median(A): how many times faster A is, with the 95 % interval of a bootstrap over pairs."""
        a, b = np.array(self.a_s), np.array(self.b_s)
        picks = np.random.default_rng(0).integers(0, len(a), (_NUM_BOOTSTRAP, len(a)))
        ratios = np.median(b[picks], axis=1) / np.median(a[picks], axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return float(np.median(b) / np.median(a)), float(low), float(high)


def run_pairs(a: Callable[[], float], b: Callable[[], float], num_pairs: int, other_cpu_s: Callable[[], float] = lambda: 0.0) -> Paired:
    """Time A and B in turn, order alternating per pair, after one warm-up each. Each callable returns its own measured seconds.

    `other_cpu_s`: CPU seconds so far of other processes that belong to the arms, and so are no neighbours.
    """
    a(), b()
    a_s: list[float] = []
    b_s: list[float] = []
    num_dropped = 0
    while len(a_s) < num_pairs and num_dropped <= 2 * num_pairs:
        before, other_before_s = _cpu_seconds(), other_cpu_s()
        started_s = time.perf_counter()
        if len(a_s) % 2 == 0:
            pair = (a(), b())
        else:
            second = b()
            pair = (a(), second)
        wall_s = time.perf_counter() - started_s
        total, own = (after - start for after, start in zip(_cpu_seconds(), before, strict=True))
        own += other_cpu_s() - other_before_s
        if (total - own) / (wall_s * (os.cpu_count() or 1)) > _MAX_FOREIGN_SHARE:
            num_dropped += 1
            continue
        a_s.append(pair[0])
        b_s.append(pair[1])
    if len(a_s) < num_pairs:
        raise SystemExit(f"only {len(a_s)} of {num_pairs} pairs had the machine to themselves; try again when it is quiet")
    return Paired(a_s, b_s, num_dropped)


def environment() -> dict[str, object]:
    """Machine, versions and commit: what a figure needs beside it."""
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain", "src", "benchmarks/decode.py"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": git.stdout.strip() + ("+" if dirty.stdout.strip() else ""),
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def append_result(path: Path, row: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds used so far by the whole machine (steal included) and by this process."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    tick = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return (user + nice + system + irq + softirq + steal) / tick, own.user + own.system
