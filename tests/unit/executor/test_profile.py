"""Step costs measured at start: on a fake device and clock, on a tiny model, and their file on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import EngineConfig, ServerConfig, settle_server
from paceline.core.facts import EngineFacts, StepCosts
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import StepPlan
from paceline.core.progress import SilentProgress
from paceline.executor import profile
from paceline.executor.cost_cache import MAX_FILES, CostCache, cost_key
from paceline.executor.load import load_executor
from paceline.executor.step_kinds import Kind, Measured, Measurement
from tests.fakes.drafting_world import world_facts
from tests.fakes.token_engine import engine, make_models

MEASURED = Measured((Measurement(Kind(1, 0, 64), 1, 3.5, 0.0), Measurement(Kind(8, 5, 64), 16, 9, 0.25)), 2)
PLAIN = Kind(1, 0, 64)
FACTS = world_facts(StepCosts())


class Device:
    """A step takes `ms_per_token` for each of its tokens, and `first_ms` more the first time."""

    def __init__(self, ms_per_token: float, first_ms: float = 0.0) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self._started_s = 0.0
        self._ms_per_token = ms_per_token
        self._first_ms = first_ms

    def run(self, plan: StepPlan) -> StepOutcome:
        ms = self._ms_per_token * plan.num_tokens_upper_bound + (0.0 if self.plans else self._first_ms)
        self.plans.append(plan)
        self.now_s += ms / 1e3
        slots = tuple(SlotOutcome(span.slot, (1,), span.draft_budget, 0, 0) for span in plan.spans)
        num_drafted = sum(span.draft_budget for span in plan.spans)
        return StepOutcome(0, slots, StepStats(0.1, ms, 0, ms + 0.1, len(slots), plan.num_tokens_upper_bound, num_drafted, 0))

    def measure(self, facts: EngineFacts = FACTS, max_batch_size: int = 256, known: Measured | None = None) -> Measured:
        """One start."""
        self.plans.clear()
        self._started_s = self.now_s
        return profile.measure(facts, max_batch_size, self.run, known, lambda: self.now_s)

    @property
    def taken_s(self) -> float:
        return self.now_s - self._started_s


def test_a_quick_device_is_measured_on_the_whole_grid() -> None:
    device = Device(1.0, 200.0)
    measured = device.measure()
    assert not measured.missing(profile.grid(FACTS.max_draft_length))
    costs = measured.costs()
    assert {cost.num_tokens for cost in costs.target} == {1, 2, 3, 4, 6, 8, 16, 32, 64}
    assert all(cost.ms == pytest.approx(cost.num_tokens) for cost in costs.target), "the first pass is left out"
    assert all(cost.ms == pytest.approx(0.1) for cost in costs.drafter)
    assert {cost.num_drafts for cost in costs.drafter} == {1, 2, 3, 5}
    assert any(cost.num_context_tokens >= 1024 for cost in costs.target)


@pytest.mark.parametrize("ms_per_token", [20.0, 60.0, 150.0, 600.0])
def test_a_slow_device_takes_no_more_than_its_time_and_stops_after_two_starts(ms_per_token: float) -> None:
    device, kinds = Device(ms_per_token), profile.grid(FACTS.max_draft_length)
    first = device.measure()
    assert first.missing(kinds)
    assert device.taken_s <= profile.BUDGET_S + 6 * ms_per_token / 1e3
    assert first.costs().target[0].num_tokens == 1
    assert ms_per_token > 200 or len(first.measurements) > 1
    second = device.measure(known=first)
    assert device.taken_s <= profile.BUDGET_S + 6 * ms_per_token / 1e3
    assert set(first.measurements) <= set(second.measurements), "what is known is kept"
    again = {Kind(len(plan.spans), plan.spans[0].draft_budget, len(plan.admitted[0].token_ids)) for plan in device.plans} - {PLAIN}
    assert again.isdisjoint(done.kind for done in first.measurements), "and not measured again"
    assert device.measure(known=second) is second
    assert device.taken_s <= 2.5 * ms_per_token / 1e3, "a plain step is looked at, no more"
    assert device.taken_s <= 0.5


def test_the_second_start_measures_what_is_missing() -> None:
    device, kinds = Device(10.0), profile.grid(FACTS.max_draft_length)
    first = device.measure()
    missing = first.missing(kinds)
    second = device.measure(known=first)
    assert missing
    assert len(second.missing(kinds)) < len(missing)
    assert all(cost.ms == pytest.approx(10 * cost.num_tokens) for cost in second.costs().target)


def test_measurements_of_a_busy_machine_are_replaced_by_those_of_a_quiet_one_and_never_the_reverse() -> None:
    busy, quiet = Device(3.0), Device(1.0)
    bad, good = busy.measure(), quiet.measure()
    assert not good.missing(profile.grid(FACTS.max_draft_length))
    assert quiet.measure(known=bad) == good
    assert busy.measure(known=good) is good
    assert busy.taken_s < 0.02
    some = Measured(good.measurements[:4], 1)
    assert busy.measure(known=some) is some, "what it takes now does not fit what is known"
    assert quiet.measure(known=some).costs() == good.costs(), "and the round is not lost"
    assert Device(1.1).measure(known=good) is good
    assert Device(0.95).measure(known=good) is good


def test_a_round_begins_with_a_plain_step_whatever_is_known() -> None:
    foreign = Measured((Measurement(Kind(3, 0, 64), 3, 1.0, 0.0),), 2)
    measured = Device(1.0).measure(known=foreign)
    assert measured == Device(1.0).measure()


def test_small_limits_leave_kinds_out() -> None:
    small = replace(FACTS, num_pages=8, max_model_len=128, drafter_max_len=128)
    device = Device(1.0)
    costs = device.measure(small, max_batch_size=2).costs()
    assert {cost.num_tokens for cost in costs.target} == {1, 2, 3, 4, 6}
    assert {cost.num_rows for cost in costs.target} == {1}
    for plan in device.plans:
        assert all(page < 8 for _, pages in plan.new_pages for page in pages)
    assert Device(1.0).measure(replace(FACTS, max_model_len=16)) == Measured()


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
    steps: list[StepPlan] = []

    def count(plan: StepPlan) -> StepOutcome:
        steps.append(plan)
        return run(plan)

    run = executor.run_apart
    monkeypatch.setattr(executor, "run_apart", count)
    monkeypatch.setattr(profile, "_CHANGED", 1e9)  # a neighbour of the test may make all of it slower or faster
    for _ in range(profile.MAX_ROUNDS):
        again = profile.with_step_costs(config, executor, facts)
        assert set(known.step_costs.target) <= set(again.step_costs.target)
        known = again
    steps.clear()
    assert profile.with_step_costs(config, executor, facts) == known
    assert {plan.num_tokens_upper_bound for plan in steps} <= {1}, "nothing is measured any more"
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
    cache.write(MEASURED)
    assert cache.read() == MEASURED
    assert CostCache(key(threads=1), tmp_path).read() is None
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


def file(**changes: object) -> str:
    row = {"num_rows": 2, "num_drafts": 5, "num_context_tokens": 64, "num_tokens": 12, "target_ms": 3.5, "drafter_ms": 0.5}
    return json.dumps({"key": key(), "num_rounds": 2, "measurements": [row | changes]})


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    cache = CostCache(key(), tmp_path)
    cache.path.parent.mkdir()
    cache.path.write_text(file())
    assert cache.read() == Measured((Measurement(Kind(2, 5, 64), 12, 3.5, 0.5),), 2)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", '{"key": {}}', "\x00\xff", "[" * 100_000, "9" * 100_000,
        file(target_ms=-1), file(target_ms=0), file(target_ms=1e400), file(target_ms="1"), file(drafter_ms=-1), file(drafter_ms=None),
        file(num_rows=0), file(num_tokens=True), file(num_tokens=13), file(num_tokens=0), file(num_drafts=-1), file(num_context_tokens=0),
        json.dumps({"key": key(), "num_rounds": 1, "measurements": [1]}),
        json.dumps({"key": key(), "num_rounds": 1, "measurements": [{}] * 300}),
        json.dumps({"key": key(), "num_rounds": 0, "measurements": []}),
        json.dumps({"key": key(), "num_rounds": 10_000, "measurements": []}),
        json.dumps({"key": key(), "num_rounds": 1, "measurements": {}}),
        json.dumps({"key": key(threads=3), "num_rounds": 1, "measurements": []}),
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_line(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CostCache(key(), tmp_path)
    cache.path.parent.mkdir()
    cache.path.write_bytes(text.encode("latin-1"))
    assert cache.read() is None
    assert "measured anew" in caplog.text
    cache.write(MEASURED)
    assert cache.read() == MEASURED


def test_an_unusable_folder_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-costs").write_text("a file")
    cache = CostCache(key(), tmp_path)
    assert cache.read() is None
    cache.write(MEASURED)
    assert "are not kept" in caplog.text


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    for threads in range(1, MAX_FILES + 6):
        CostCache(key(threads=threads), tmp_path).write(MEASURED)
    assert len(list((tmp_path / "step-costs").iterdir())) == MAX_FILES
    assert CostCache(key(threads=MAX_FILES + 5), tmp_path).read() == MEASURED
