"""Timing for benchmarks: arms in turn in one process, medians and ratios of medians with 95 % bootstrap intervals.

Rounds in which other processes took more than a tenth of the machine are dropped and repeated, so a busy neighbour cannot make a claim.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.engine.process import OPENMP_ENVIRONMENT

if TYPE_CHECKING:
    import torch

os.environ.update(OPENMP_ENVIRONMENT)  # before torch is loaded: all arms wait at barriers as the served engine does

_MAX_FOREIGN_SHARE = 0.10
_NUM_BOOTSTRAP = 10_000
_PROBE_BYTES = 256 << 20  # beyond any cache
LEAST_ROUNDS = 3  # whatever the time limit: fewer have no interval

Interval = tuple[float, float, float]
"""A value and the two ends of its 95 % interval."""
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Of the last axis."""


class BusyError(SystemExit):
    """Other processes kept the machine from being measured."""


@dataclass(frozen=True)
class Effort:
    """How long a row is measured: `num_rounds`, or as many (three at least) as begin within `limit_s`."""

    num_rounds: int = 20
    limit_s: float = math.inf


@dataclass(frozen=True)
class Paired:
    """Seconds of each kept pair, A and B; `num_dropped` pairs lost their cores to other processes."""

    a_s: list[float]
    b_s: list[float]
    num_dropped: int

    def ratio(self) -> Interval:
        """Median(B) / median(A): how many times faster A is, with the 95 % interval of a bootstrap over pairs."""
        return ratio_of(self.b_s, self.a_s, _median)


def run_rounds(
    arms: Sequence[Callable[[int], float]], effort: Effort, other_cpu_s: Callable[[], float] = lambda: 0.0
) -> tuple[list[list[float]], int]:
    """Time all arms in turn, the order turning round with each round; the seconds by arm, and the number of dropped rounds.

    Each arm gets the number of the round, the same one again if that is dropped, and returns its own measured seconds. `other_cpu_s`: CPU
    seconds so far of other processes that belong to the arms, and so are no neighbours. Whoever calls has warmed the arms up. Errors:
    BusyError if more than two of three rounds had to be dropped.
    """
    kept: list[list[float]] = [[] for _ in arms]
    num_dropped, num_kept = 0, 0
    end_s = time.perf_counter() + effort.limit_s
    while num_kept < effort.num_rounds and (num_kept < LEAST_ROUNDS or time.perf_counter() < end_s):
        before, other_before_s = _cpu_seconds(), other_cpu_s()
        started_s = time.perf_counter()
        order = range(len(arms)) if num_kept % 2 == 0 else reversed(range(len(arms)))
        seconds = {place: arms[place](num_kept) for place in order}
        wall_s = time.perf_counter() - started_s
        total, own = (after - start for after, start in zip(_cpu_seconds(), before, strict=True))
        own += other_cpu_s() - other_before_s
        if (total - own) / (wall_s * (os.cpu_count() or 1)) > _MAX_FOREIGN_SHARE:
            num_dropped += 1
            if num_dropped > 2 * max(num_kept, LEAST_ROUNDS):
                raise BusyError(f"only {num_kept} of {num_kept + num_dropped} rounds had the machine to themselves; try when it is quiet")
            continue
        num_kept += 1
        for place, value in seconds.items():
            kept[place].append(value)
    return kept, num_dropped


def run_pairs(
    a: Callable[[], float], b: Callable[[], float], effort: Effort | int, other_cpu_s: Callable[[], float] = lambda: 0.0
) -> Paired:
    """`run_rounds` of A and B after one warm-up each."""
    a(), b()
    effort = Effort(effort) if isinstance(effort, int) else effort
    (a_s, b_s), num_dropped = run_rounds((lambda _: a(), lambda _: b()), effort, other_cpu_s)
    return Paired(a_s, b_s, num_dropped)


def median_of(values: Sequence[float]) -> Interval:
    """The median, with the 95 % interval of a bootstrap over the values."""
    low, high = np.percentile(_median(np.array(values)[_picks(len(values))]), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def ratio_of(above: Sequence[float], below: Sequence[float], statistic: Statistic) -> Interval:
    """statistic(above) / statistic(below) of paired values, with the 95 % interval of a bootstrap over pairs."""
    upper, lower = np.array(above), np.array(below)
    picks = _picks(len(upper))
    low, high = np.percentile(statistic(upper[picks]) / statistic(lower[picks]), [2.5, 97.5])
    return float(statistic(upper) / statistic(lower)), float(low), float(high)


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Interval:
    return ratio_of(above, below, lambda values: values.mean(axis=-1))


def inverse(interval: Interval, scale: float = 1.0) -> Interval:
    """`scale` / value: rates from seconds."""
    value, low, high = interval
    return scale / value, scale / high, scale / low


def scaled(interval: Interval, scale: float) -> Interval:
    value, low, high = interval
    return value * scale, low * scale, high * scale


def read_gb_s() -> float:
    """GB/s at which torch's threads read memory beyond every cache now: the best of three passes, a probe of the machine's state."""
    import torch

    block = _probe_block()
    best_s = math.inf
    for _ in range(3):
        started_s = time.perf_counter()
        torch.sum(block)
        best_s = min(best_s, time.perf_counter() - started_s)
    return _PROBE_BYTES / best_s / 1e9


def blocks(arm: Callable[[], float], block_s: float, probes: list[float]) -> Callable[[int], float]:
    """An arm that runs for `block_s` and gives the median; before each block the memory's speed goes to `probes`."""

    def run(_: int) -> float:
        probes.append(read_gb_s())
        end_s = time.perf_counter() + block_s
        times_s = [arm()]
        while time.perf_counter() < end_s:
            times_s.append(arm())
        return statistics.median(times_s)

    return run


def environment() -> dict[str, object]:
    """Machine, versions and commit: what a figure needs beside it."""
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=root)
    changed = ["git", "status", "--porcelain", "src", "benchmarks/*.py"]
    dirty = subprocess.run(changed, capture_output=True, text=True, check=False, cwd=root)
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


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.median(values, axis=-1)


def _picks(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (_NUM_BOOTSTRAP, count))


@cache
def _probe_block() -> "torch.Tensor":
    """Written once, so that every page is there."""
    import torch

    return torch.ones(_PROBE_BYTES // 4, dtype=torch.float32)


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds used so far by the whole machine (steal included) and by this process."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    tick = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return (user + nice + system + irq + softirq + steal) / tick, own.user + own.system
