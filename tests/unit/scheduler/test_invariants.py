"""The invariants of the scheduler as properties over random schedules, at queue depths 1 and 2 with outcomes one step late."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.plan import SpanKind
from paceline.core.request import FinishReason, Request
from paceline.scheduler.draft_length import DraftLengthPolicy, DraftRow, FullDraftLength, GuardedDraftLength
from paceline.scheduler.passes import StepBuilder
from paceline.scheduler.prefix_cache import CachedPage
from paceline.scheduler.row import Row
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, make_config, make_facts, make_request


class ListedLengths(FullDraftLength):
    """Draft lengths from a list, over and over; the answers may exceed the limit, which the scheduler must not trust."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._num_calls = 0

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        self._num_calls += len(rows)
        return [self._lengths[(self._num_calls - i) % len(self._lengths)] for i in range(len(rows))]


@dataclass(frozen=True)
class Arrival:
    request: Request
    step: int
    abort_step: int | None


@dataclass(frozen=True)
class Scenario:
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_batched_tokens: int
    max_batch_size: int
    enable_prefix_caching: bool
    max_draft_length: int
    keeps_kv: bool
    drafter_max_len: int
    accuracy: float
    lengths: tuple[int, ...] | None  # None: the default policy; (): as many as allowed
    arrivals: tuple[Arrival, ...]

    def policy(self) -> DraftLengthPolicy:
        if self.lengths is None:
            return GuardedDraftLength(make_facts())
        return ListedLengths(list(self.lengths)) if self.lengths else FullDraftLength()


def random_scenario(rng: random.Random) -> Scenario:
    """Pools and budgets are mostly tight, and most requests long enough to meet each other."""
    page_size = rng.randint(1, 5)
    max_model_len = rng.choice([5, 17, 24, 32, 48, 48])
    least_pages = -(-max_model_len // page_size)
    num_prompts = rng.randint(1, 2)
    return Scenario(
        page_size=page_size,
        num_pages=least_pages + rng.choice([0, least_pages // 4, least_pages // 2, least_pages, 3 * least_pages]),
        max_model_len=max_model_len,
        max_num_batched_tokens=rng.choice([rng.randint(1, 4), 6, 8, 12, 16, 24, 64]),
        max_batch_size=rng.choice([rng.randint(1, 2), 3, 4, 6, 6]),
        enable_prefix_caching=rng.random() < 0.7,
        max_draft_length=rng.choice([0, 1, 3, 3, 5, 5]),
        keeps_kv=rng.random() < 0.6,
        drafter_max_len=max_model_len + rng.choice([0, 0, 20, -(max_model_len // 3), 2 - max_model_len]),
        accuracy=rng.choice([0.0, 0.5, 0.9, 1.0]),
        lengths=rng.choice([None, (), tuple(rng.randint(0, 6) for _ in range(rng.randint(1, 7)))]),
        arrivals=tuple(random_arrival(rng, f"r{index}", num_prompts, max_model_len) for index in range(rng.randint(3, 9))),
    )


def random_arrival(rng: random.Random, request_id: str, num_prompts: int, max_model_len: int) -> Arrival:
    """Prompts come from few families and differ in length and tail, so that prefixes are shared in part and in full."""
    family = rng.randrange(num_prompts)
    num_tokens = rng.randint(1, max_model_len - 1 if rng.random() < 0.3 else max(max_model_len // 5, 1))
    prompt = [(family + position) % 7 + 1 for position in range(num_tokens)]
    if rng.random() < 0.3:
        for position in range(rng.randrange(num_tokens), num_tokens):
            prompt[position] = rng.randrange(11)
    request = make_request(
        request_id,
        tuple(prompt),
        rng.choice([rng.randint(1, 5), 20, 40, 40]),
        stop_token_ids=rng.choice([(), (), (), (), (), (3,), (4, 5)]),
        ignore_eos=rng.random() < 0.85,
        seed=rng.randrange(2),
        max_draft_length=rng.choice([None, None, None, 0, 2, 9]),
    )
    request = replace(request, cache_salt=rng.choice(["", "", "", "b"]))
    return Arrival(request, rng.choice([0, 0, 0, rng.randint(0, 25)]), rng.choice([None, None, rng.randint(0, 30)]))


def play(scenario: Scenario, depth: int) -> Driver:
    facts = make_facts(
        num_pages=scenario.num_pages,
        page_size=scenario.page_size,
        max_model_len=scenario.max_model_len,
        max_draft_length=scenario.max_draft_length,
        keeps_kv=scenario.keeps_kv,
        drafter_max_len=scenario.drafter_max_len,
        eos_token_ids=(0,),
    )
    config = make_config(
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        max_batch_size=scenario.max_batch_size,
        enable_prefix_caching=scenario.enable_prefix_caching,
    )
    driver = Driver(facts, config, depth=depth, policy=scenario.policy(), drafter=ToyDrafter(scenario.accuracy))
    num_tokens = sum(len(arrival.request.prompt_token_ids) + arrival.request.sampling.max_tokens for arrival in scenario.arrivals)
    last_event = max(max(arrival.step, arrival.abort_step or 0) for arrival in scenario.arrivals)
    for turn in range(last_event + 20 * num_tokens):
        for arrival in scenario.arrivals:
            if arrival.step == turn:
                driver.add(arrival.request)
            if arrival.abort_step == turn:
                driver.abort(arrival.request.request_id)
        driver.clock.now_s += 0.01
        has_run = driver.step()
        assert has_run or not driver.scheduler.has_unfinished, "unfinished requests, nothing in flight, and no plan"
        if turn > last_event and not driver.scheduler.has_unfinished and not driver.in_flight:
            break
    driver.run(0) if driver.scheduler.has_unfinished else driver.check_drained()
    return driver


def check(scenario: Scenario, depth: int) -> None:
    driver = play(scenario, depth)
    driver.check_outputs()
    for request_id, deltas in driver.deltas.items():
        stats = deltas[-1].stats
        assert stats is not None
        assert sum(stats.draft.accepted_histogram) == stats.draft.num_spec_steps
        assert len(stats.draft.accepted_histogram) == stats.max_draft_length + 1
        by_length = stats.draft.histograms_by_draft_length
        assert sum(length * sum(histogram) for length, histogram in by_length.items()) == stats.draft.num_draft_tokens
        padded = [histogram + [0] * (stats.max_draft_length - length) for length, histogram in by_length.items()]
        assert not padded or [sum(column) for column in zip(*padded, strict=True)] == stats.draft.accepted_histogram
        assert min(stats.queue_ms, stats.prefill_ms, stats.decode_ms) >= 0
        assert stats.num_cached_tokens < len(driver.requests[request_id].prompt_token_ids)
    totals = driver.scheduler.stats()
    assert totals.num_generation_tokens == sum(len(driver.output(request_id)) for request_id in driver.deltas)
    assert totals.num_steps == driver.num_steps
    assert sum(totals.num_accepted_tokens_per_pos) == totals.num_accepted_tokens


def careless_fits(builder: StepBuilder, row: Row, cached: list[CachedPage]) -> bool:
    """Admission with room for a first token only: sequences crowd in and must be preempted all the time."""
    pool = builder._residents.pool
    return sum(pool.ref_counts[page.page_id] == 0 for page in cached) + 1 <= pool.num_free


slow_machine = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
any_scenario = st.randoms(use_true_random=True).map(random_scenario)


@slow_machine
@given(any_scenario)
def test_any_schedule_at_depth_1(scenario: Scenario) -> None:
    check(scenario, 1)


@slow_machine
@given(any_scenario)
def test_any_schedule_at_depth_2(scenario: Scenario) -> None:
    check(scenario, 2)


@slow_machine
@given(any_scenario, st.sampled_from([1, 2]))
def test_any_schedule_with_careless_admission(scenario: Scenario, depth: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepBuilder, "_fits", careless_fits)
        check(scenario, depth)


def test_scenarios_reach_what_they_are_for() -> None:
    """The random schedules do preempt, share prefixes, catch up in parts, run ahead, and end in every way."""
    drivers = [play(random_scenario(random.Random(seed)), 2) for seed in range(60)]
    spans = [span for driver in drivers for plan in driver.plans for span in plan.spans]
    stats = [driver.scheduler.stats() for driver in drivers]
    assert sum(each.num_preemptions for each in stats) > 20
    assert sum(each.num_prefix_hit_tokens for each in stats) > 100
    assert sum(span.start != span.start_max for span in spans) > 300
    assert sum(span.draft_catch_up > 2 for span in spans) > 50
    assert sum(span.draft_catch_up > 2 and span.kind is SpanKind.PREFILL for span in spans) > 15
    assert any(plan.freed_pages for driver in drivers for plan in driver.plans)
    admissions = [admission for driver in drivers for plan in driver.plans for admission in plan.admitted]
    assert any(admission.num_draft_computed_tokens > 0 for admission in admissions)
    assert any(admission.num_draft_computed_tokens < admission.num_computed_tokens for admission in admissions)
    reasons = {deltas[-1].finish_reason for driver in drivers for deltas in driver.deltas.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
