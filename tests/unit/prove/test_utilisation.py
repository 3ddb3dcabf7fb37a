"""CPU time of a server's processes, against a /proc made up and against this process."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.prove.counters import BANDWIDTH_FRACTION, GPU_PERCENT
from paceline.prove.judgement import Utilisation
from paceline.prove.record import Arm, Phase
from paceline.prove.utilisation import GPU_COUNTER, Sampler, by_arm, by_concurrency, cpu_seconds
from tests.fakes.made_records import made_dataset, made_measurement

TICKS = os.sysconf("SC_CLK_TCK")
RUNS = made_measurement(made_dataset()).runs


def add_process(proc: Path, pid: int, parent: int, ticks: int, name: str = "some (odd) name)") -> None:
    (proc / str(pid)).mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", "20"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}")


def test_cpu_time_is_that_of_the_process_and_its_descendants(tmp_path: Path) -> None:
    for pid, parent, ticks in ((10, 1, 3 * TICKS), (11, 10, 4 * TICKS), (12, 11, 5 * TICKS), (13, 1, 100 * TICKS)):
        add_process(tmp_path, pid, parent, ticks)
    assert cpu_seconds(10, tmp_path) == 12.0
    assert cpu_seconds(13, tmp_path) == 100.0
    assert cpu_seconds(99, tmp_path) is None


def test_this_process_has_used_some_and_uses_more() -> None:
    before = cpu_seconds(os.getpid())
    total = sum(number * number for number in range(1_500_000))
    after = cpu_seconds(os.getpid())
    assert total
    assert before is not None
    assert after is not None
    assert after > before > 0


def sampler_with(share: dict[Arm, float]) -> Sampler:
    """Of two cores, the share that is busy while an arm runs; nothing is busy in between."""
    sampler = Sampler(lambda: None, num_cores=2)
    busy_s = 0.0
    sampler.add(RUNS[0].start_s - 1, busy_s)
    for run in RUNS:
        sampler.add(run.start_s, busy_s)
        busy_s += share[run.arm] * 2 * (run.end_s - run.start_s)
        sampler.add(run.end_s, busy_s)
    return sampler


def test_each_arm_has_the_time_of_its_own_blocks() -> None:
    sampler = sampler_with({Arm.BASELINE: 0.5, Arm.SPECULATIVE: 0.9})
    samplers = dict.fromkeys(Arm, sampler)
    found = by_arm(samplers, RUNS)
    assert found[Arm.BASELINE].percent == pytest.approx(50)
    assert found[Arm.SPECULATIVE].percent == pytest.approx(90)
    assert "2 cores" in found[Arm.BASELINE].counter
    (entry,) = by_concurrency(samplers, RUNS)
    assert entry == {"concurrency": 1, "counter": sampler.counter, "baseline": pytest.approx(50), "speculative": pytest.approx(90)}


def test_what_the_server_publishes_of_its_gpu_counts_before_its_cpu_time() -> None:
    """A run counts by its length, and names the counter."""
    gauges = {Arm.BASELINE: {GPU_PERCENT: 40.0}, Arm.SPECULATIVE: {GPU_PERCENT: 90.0, BANDWIDTH_FRACTION: 0.5}}
    runs = [replace(run, gauges=gauges[run.arm]) for run in RUNS]
    samplers = dict.fromkeys(Arm, sampler_with(dict.fromkeys(Arm, 0.5)))
    found = by_arm(samplers, runs)
    assert found[Arm.SPECULATIVE] == Utilisation(pytest.approx(90.0), GPU_COUNTER, pytest.approx(0.5), "gpu")
    assert found[Arm.BASELINE] == Utilisation(pytest.approx(40.0), GPU_COUNTER, None, "gpu")
    assert by_arm({}, runs) == found, "a server on another machine too"
    of_cpu, of_gpu, of_bandwidth = by_concurrency(samplers, runs)
    assert of_gpu == {"concurrency": 1, "counter": GPU_COUNTER, "baseline": pytest.approx(40), "speculative": pytest.approx(90)}
    assert (of_cpu["baseline"], of_bandwidth["speculative"], "baseline" in of_bandwidth) == (pytest.approx(50), pytest.approx(50), False)
    first = next(run for run in runs if run.arm is Arm.BASELINE)
    longer = replace(first, gauges={GPU_PERCENT: 100.0}, end_s=first.start_s + 3 * (first.end_s - first.start_s))
    assert by_arm({}, [first, longer])[Arm.BASELINE].percent == pytest.approx((40 + 3 * 100) / 4)


def test_of_a_cpu_the_bandwidth_stands_beside_its_time() -> None:
    runs = [replace(run, gauges={BANDWIDTH_FRACTION: 0.7}) for run in RUNS]
    found = by_arm(dict.fromkeys(Arm, sampler_with(dict.fromkeys(Arm, 0.5))), runs)
    assert (found[Arm.SPECULATIVE].device, found[Arm.SPECULATIVE].bandwidth_fraction) == ("cpu", pytest.approx(0.7))


def test_between_two_samples_the_counter_rises_evenly() -> None:
    sampler = Sampler(lambda: None, num_cores=1)
    sampler.add(0.0, 0.0)
    sampler.add(10.0, 4.0)
    run = replace(RUNS[0], start_s=2.0, end_s=7.0)
    assert sampler.percent([run]) == pytest.approx(40)


def test_what_no_sample_covers_has_no_figure() -> None:
    sampler = Sampler(lambda: None, num_cores=1)
    assert sampler.percent(RUNS) is None
    sampler.add(RUNS[0].start_s + 0.01, 0.0)
    sampler.add(RUNS[0].end_s + 0.01, 0.0)
    assert sampler.percent(RUNS[:1]) is None, "it began after the block did"
    assert by_arm({}, RUNS) == {}
    assert by_concurrency(dict.fromkeys(Arm, sampler), RUNS) == []


def test_warm_up_does_not_count() -> None:
    warm = [replace(run, phase=Phase.WARM_UP) for run in RUNS]
    assert by_arm({Arm.BASELINE: sampler_with(dict.fromkeys(Arm, 0.5))}, warm) == {}


async def test_it_samples_until_the_block_ends_and_skips_what_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.prove.utilisation._INTERVAL_S", 0.001)
    readouts = iter([1.0, None, 2.0])
    async with Sampler(lambda: next(readouts, 3.0), num_cores=1) as sampler:
        while len(sampler.busy_s) < 3:  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(0.001)
    number = len(sampler.busy_s)
    await asyncio.sleep(0.01)
    assert len(sampler.busy_s) == number
    assert sampler.busy_s[:3] == [1.0, 2.0, 3.0]
    assert sampler.times_s == sorted(sampler.times_s)
