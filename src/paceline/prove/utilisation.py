"""How busy a server was while an arm ran: what it publishes of its GPU, or CPU time of its processes on this machine, from /proc.

"Utilisation" without its counter means nothing, so the counter's name goes with the figure. CPU time is sampled beside the measurement.
"""

import asyncio
import bisect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.prove.counters import BANDWIDTH_FRACTION, GPU_PERCENT
from paceline.prove.judgement import Utilisation
from paceline.prove.record import Arm, BlockRun, Phase

_INTERVAL_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")
GPU_COUNTER = f"{GPU_PERCENT} of the server's /metrics"
_BANDWIDTH_COUNTER = f"memory bandwidth, by {BANDWIDTH_FRACTION} of the server's /metrics"

Readout = Callable[[], float | None]


def cpu_seconds(pid: int, proc: Path = _PROC) -> float | None:
    """CPU time of a process and of all that descend from it, those that ended and were waited for included; None if it is gone."""
    own: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(folder.name)
        own[number] = sum(map(int, fields[11:15]))  # user and system time, of itself and of children that it waited for
        children.setdefault(int(fields[1]), []).append(number)
    if pid not in own:
        return None
    ticks, waiting = 0, [pid]
    while waiting:
        number = waiting.pop()
        ticks += own[number]
        waiting += children.get(number, [])
    return ticks / _TICKS_PER_S


@dataclass(slots=True)
class Sampler:
    """Reads a cumulative counter of busy seconds twice a second, as an async context manager around a measurement."""

    read: Readout
    num_cores: int
    clock: Callable[[], float] = time.monotonic  # the clock of the records
    times_s: list[float] = field(default_factory=list[float])
    busy_s: list[float] = field(default_factory=list[float])
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample(self) -> None:
        while True:
            busy_s = await asyncio.to_thread(self.read)  # reading /proc must not make chunks wait
            if busy_s is not None:
                self.add(self.clock(), busy_s)
            await asyncio.sleep(_INTERVAL_S)

    def add(self, time_s: float, busy_s: float) -> None:
        self.times_s.append(time_s)
        self.busy_s.append(busy_s)

    @property
    def counter(self) -> str:
        return f"CPU time of the server's processes, of {self.num_cores} cores"

    def percent(self, runs: Sequence[BlockRun]) -> float | None:
        """Busy share of all cores over the runs together; None where the samples do not cover them."""
        spans = [(self._at(run.start_s), self._at(run.end_s), run.end_s - run.start_s) for run in runs]
        busy_s = sum(end - start for start, end, _ in spans if start is not None and end is not None)
        wall_s = sum(length for start, end, length in spans if start is not None and end is not None)
        return 100 * busy_s / (wall_s * self.num_cores) if wall_s > 0 else None

    def _at(self, time_s: float) -> float | None:
        """The counter at a time, between two samples by a straight line."""
        place = bisect.bisect_left(self.times_s, time_s)
        if place == len(self.times_s) or (place == 0 and self.times_s[0] != time_s):
            return None
        if self.times_s[place] == time_s:
            return self.busy_s[place]
        before_s, after_s = self.times_s[place - 1], self.times_s[place]
        share = (time_s - before_s) / (after_s - before_s)
        return self.busy_s[place - 1] + share * (self.busy_s[place] - self.busy_s[place - 1])


def by_arm(samplers: dict[Arm, Sampler], runs: Sequence[BlockRun]) -> dict[Arm, Utilisation]:
    """Over all measured blocks of each arm, for the criteria: of the GPU where the server publishes it, else of the CPU."""
    found: dict[Arm, Utilisation] = {}
    for arm in Arm:
        mine = [run for run in runs if run.arm == arm and run.phase == Phase.MEASURE]
        gpu_percent, bandwidth_fraction = (_mean_gauge(name, mine) for name in (GPU_PERCENT, BANDWIDTH_FRACTION))
        cpu_percent = samplers[arm].percent(mine) if arm in samplers else None
        if gpu_percent is not None:
            found[arm] = Utilisation(gpu_percent, GPU_COUNTER, bandwidth_fraction)
        elif cpu_percent is not None:
            found[arm] = Utilisation(cpu_percent, samplers[arm].counter, bandwidth_fraction, device="cpu")
    return found


def _mean_gauge(name: str, runs: Sequence[BlockRun]) -> float | None:
    """Over the time of the runs that have it."""
    told = [(run.gauges[name], run.end_s - run.start_s) for run in runs if name in run.gauges]
    wall_s = sum(length_s for _, length_s in told)
    return sum(value * length_s for value, length_s in told) / wall_s if wall_s > 0 else None


def by_concurrency(samplers: dict[Arm, Sampler], runs: Sequence[BlockRun]) -> list[dict[str, object]]:
    """For the comparison in the report: {counter, concurrency, rate_per_s, baseline, speculative} in per cent."""
    entries: list[dict[str, object]] = []
    measured = [run for run in runs if run.phase == Phase.MEASURE]
    for concurrency, rate_per_s in sorted({(run.concurrency, run.rate_per_s) for run in measured}):
        chosen = [run for run in measured if (run.concurrency, run.rate_per_s) == (concurrency, rate_per_s)]
        point: dict[str, object] = {"concurrency": concurrency}
        if rate_per_s:
            point["rate_per_s"] = rate_per_s
        shares = {arm.value: sampler.percent([run for run in chosen if run.arm == arm]) for arm, sampler in samplers.items()}
        counters = sorted({sampler.counter for sampler in samplers.values()})
        if any(share is not None for share in shares.values()):
            entries.append({**point, "counter": "; ".join(counters), **shares})
        for counter, name, scale in ((GPU_COUNTER, GPU_PERCENT, 1), (_BANDWIDTH_COUNTER, BANDWIDTH_FRACTION, 100)):
            told = {arm.value: _mean_gauge(name, [run for run in chosen if run.arm == arm]) for arm in Arm}
            percents = {arm: scale * value for arm, value in told.items() if value is not None}
            if percents:
                entries.append({**point, "counter": counter, **percents})
    return entries
