"""Step costs measured at start: on a fake device and clock, on a tiny model, and their file on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import EngineConfig, ServerConfig, settle_server
from paceline.core.facts import DrafterCost, EngineFacts, StepCosts, TargetCost
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import StepPlan
from paceline.core.progress import SilentProgress
from paceline.executor import profile
from paceline.executor.cost_cache import MAX_FILES, CostCache, cost_key
from paceline.executor.load import load_executor
from tests.fakes.drafting_world import world_facts
from tests.fakes.token_engine import engine, make_models

COSTS = StepCosts((TargetCost(1, 1, 64, 3.5), TargetCost(8, 16, 64, 9)), (DrafterCost(1, 5, 0.25),))
FACTS = world_facts(StepCosts())


class Device:
    """A step takes `ms_per_token` for each of its tokens, and `first_ms` more the first time."""

    def __init__(self, ms_per_token: float, first_ms: float = 0.0) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self._ms_per_token = ms_per_token
        self._first_ms = first_ms

    def run(self, plan: StepPlan) -> StepOutcome:
        ms = self._ms_per_token * plan.num_tokens_upper_bound + (0.0 if self.plans else self._first_ms)
        self.plans.append(plan)
        self.now_s += ms / 1e3
        slots = tuple(SlotOutcome(span.slot, (1,), span.draft_budget, 0, 0) for span in plan.spans)
        num_drafted = sum(span.draft_budget for span in plan.spans)
        return StepOutcome(0, slots, StepStats(0.1, ms, 0, ms + 0.1, len(slots), plan.num_tokens_upper_bound, num_drafted, 0))

    def measure(self, facts: EngineFacts = FACTS, max_batch_size: int = 256) -> tuple[StepCosts, bool]:
        return profile.measure(facts, max_batch_size, self.run, lambda: self.now_s)


def test_a_quick_device_is_measured_on_the_whole_grid() -> None:
    device = Device(1.0, 200.0)
    costs, is_complete = device.measure()
    assert is_complete
    assert {cost.num_tokens for cost in costs.target} == {1, 2, 3, 4, 6, 8, 16, 32, 64}
    assert all(cost.ms == pytest.approx(cost.num_tokens) for cost in costs.target), "the first pass is left out"
    assert all(cost.ms == pytest.approx(0.1) for cost in costs.drafter)
    assert {cost.num_drafts for cost in costs.drafter} == {1, 2, 3, 5}
    assert any(cost.num_context_tokens >= 1024 for cost in costs.target)


@pytest.mark.parametrize("ms_per_token", [20.0, 60.0, 150.0, 600.0])
def test_a_slow_device_takes_no_more_than_its_time_and_is_not_kept(ms_per_token: float) -> None:
    device = Device(ms_per_token)
    costs, is_complete = device.measure()
    assert not is_complete
    assert device.now_s <= profile.BUDGET_S + 6 * ms_per_token / 1e3
    assert costs.target[0].num_tokens == 1
    assert ms_per_token > 200 or len(costs.target) > 1


def test_small_limits_leave_kinds_out() -> None:
    small = replace(FACTS, num_pages=8, max_model_len=128, drafter_max_len=128)
    device = Device(1.0)
    costs, is_complete = device.measure(small, max_batch_size=2)
    assert is_complete
    assert {cost.num_rows for cost in costs.target} == {1}
    for plan in device.plans:
        assert all(page < 8 for _, pages in plan.new_pages for page in pages)
    assert Device(1.0).measure(replace(FACTS, max_model_len=16)) == (StepCosts(), True)


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_a_real_engine_is_measured_once_and_serves_as_before(draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    models = make_models(tmp_path)
    config = replace(engine(draft), speculation="auto", max_model_len=256)
    draft_folder = str(models.draft) if draft == "draft_model" else None
    config = replace(config, draft=draft_folder or draft)
    executor, facts = load_executor(config, str(models.target), draft_folder, SilentProgress())
    known = profile.with_step_costs(config, executor, facts)
    assert len(known.step_costs.target) >= 3
    assert known.step_costs.drafter[0].num_drafts == 1
    assert not executor._slots.slots
    monkeypatch.setattr(profile, "measure", lambda *_: (StepCosts(), False))
    again = profile.with_step_costs(config, executor, facts)
    if again.step_costs.target:  # on a busy machine there is not time for all, and nothing is kept
        assert again == known
    for changed in (replace(config, speculation="on"), replace(config, measure_steps=False)):
        assert profile.with_step_costs(changed, executor, facts) is facts
    executor.close()


def test_without_warm_up_nothing_is_measured() -> None:
    assert settle_server(ServerConfig()).engine.measure_steps
    assert not settle_server(ServerConfig(warmup=False)).engine.measure_steps


def key(**changes: str | int) -> dict[str, str | int]:
    return cost_key(EngineConfig(), FACTS, "2.0", 2) | changes


def test_costs_come_back_from_disk_for_the_same_key_only(tmp_path: Path) -> None:
    cache = CostCache(key(), tmp_path)
    assert cache.read() is None
    cache.write(COSTS)
    assert cache.read() == COSTS
    assert CostCache(key(threads=1), tmp_path).read() is None
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", '{"key": {}}', "\x00\xff", "[" * 100_000, "9" * 100_000,
        json.dumps({"key": key(), "target": [{"num_rows": 1, "num_tokens": 1, "num_context_tokens": 64, "ms": -1}], "drafter": []}),
        json.dumps({"key": key(), "target": [{"num_rows": 1, "num_tokens": True, "num_context_tokens": 64, "ms": 1}], "drafter": []}),
        json.dumps({"key": key(), "target": [{"num_rows": 1, "num_tokens": 1, "num_context_tokens": 64, "ms": 1e400}], "drafter": []}),
        json.dumps({"key": key(), "target": [1], "drafter": []}),
        json.dumps({"key": key(), "target": [{}] * 300, "drafter": []}),
        json.dumps({"key": key(threads=3), "target": [], "drafter": []}),
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_line(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CostCache(key(), tmp_path)
    cache.path.parent.mkdir()
    cache.path.write_bytes(text.encode("latin-1"))
    assert cache.read() is None
    assert "measured anew" in caplog.text
    cache.write(COSTS)
    assert cache.read() == COSTS


def test_an_unusable_folder_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-costs").write_text("a file")
    cache = CostCache(key(), tmp_path)
    assert cache.read() is None
    cache.write(COSTS)
    assert "are not kept" in caplog.text


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    for threads in range(1, MAX_FILES + 6):
        CostCache(key(threads=threads), tmp_path).write(COSTS)
    assert len(list((tmp_path / "step-costs").iterdir())) == MAX_FILES
    assert CostCache(key(threads=MAX_FILES + 5), tmp_path).read() == COSTS
