"""`benchmarks/paired.py`: rounds in turn, those of a busy machine repeated, and intervals of what is left."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "paired.py"


@pytest.fixture(scope="module")
def paired() -> ModuleType:
    before = dict(os.environ)
    spec = importlib.util.spec_from_file_location("paired", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "paired", module)  # dataclasses look themselves up there
        spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)
    return module


def run(paired: ModuleType, monkeypatch: pytest.MonkeyPatch, foreign: list[float]) -> tuple[list[tuple[str, int]], object]:
    """Three rounds of arms that tell their calls; `foreign`: what other processes take of the machine in each round."""
    clock, used, shares, calls = [0.0], [0.0], iter(foreign), []
    monkeypatch.setattr(paired.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(paired, "_cpu_seconds", lambda: (used[0], 0.0))

    def arm(name: str, number: int) -> float:
        calls.append((name, number))
        clock[0] += 1.0
        if len(calls) % 2 == 0:
            used[0] += next(shares) * 2.0 * (os.cpu_count() or 1)  # of the round's two seconds
        return float(number)

    arms = [lambda number, name=name: arm(name, number) for name in "ab"]
    return calls, paired.run_rounds(arms, paired.Effort(3))


def test_the_order_turns_with_each_round(paired: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, (kept, dropped) = run(paired, monkeypatch, [0.0] * 3)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert kept == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    assert dropped == 0


def test_a_round_that_lost_its_cores_is_repeated(paired: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, (kept, dropped) = run(paired, monkeypatch, [0.0, 0.2, 0.05, 0.0])
    assert [number for name, number in calls if name == "a"] == [0, 1, 1, 2]
    assert kept == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    assert dropped == 1


def test_a_busy_machine_is_refused(paired: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(paired.BusyError, match="only 0 of 7 rounds"):
        run(paired, monkeypatch, [0.5] * 20)


def test_the_time_limit_leaves_three_rounds(paired: ModuleType) -> None:
    (times,), _ = paired.run_rounds([lambda number: 1.0], paired.Effort(20, 0.0), lambda: 1e9)
    assert len(times) == paired.LEAST_ROUNDS


def test_intervals_hold_the_value_and_turn_with_it(paired: ModuleType) -> None:
    slow, fast = [2.0, 2.2, 1.9, 2.1, 2.0, 2.3], [1.0, 1.1, 0.9, 1.0, 1.05, 1.0]
    ratio, low, high = paired.Paired(fast, slow, 0).ratio()
    assert low <= ratio <= high
    assert (ratio, low) > (1.9, 1.7)
    value, low, high = paired.inverse(paired.median_of(slow), 4.0)
    assert low <= value <= high
    assert value == pytest.approx(4.0 / 2.05)
    assert paired.ratio_of_means(slow, fast)[0] == pytest.approx(12.5 / 6.05)
