"""The scheduler's API: how requests enter, end, are counted, and find their prefixes."""

import dataclasses

import pytest

from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.core.plan import StepPlan
from paceline.core.request import FinishReason, Request
from paceline.core.sequence import Sequence
from paceline.errors import BadInputError
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, make_config, make_facts, make_request

both_depths = pytest.mark.parametrize("depth", [1, 2])


def toy(
    depth: int = 1, *, config: SchedulerConfig | None = None, drafter: ToyDrafter | None = None, facts: EngineFacts | None = None
) -> Driver:
    return Driver(facts or make_facts(), config or make_config(), depth=depth, drafter=drafter)


def arriving(request: Request, arrival_s: float) -> Request:
    return dataclasses.replace(request, arrival_s=arrival_s)


def distinct_output(driver: Driver, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt whose first output tokens all differ, with that output."""
    for token_id in range(1, 10_000):
        prompt = (token_id, 5, token_id % 7)
        output, _ = driver.model.plain_output(make_request("x", prompt, num_tokens, ignore_eos=True), (), 1 << 20)
        if len(set(output)) == num_tokens:
            return prompt, output
    raise AssertionError("the toy model repeats itself")


def test_config_takes_the_engines_fields() -> None:
    limits = EngineConfig(max_num_batched_tokens=100, min_batch_size=2, max_batch_size=7, batch_wait_ms=3.0)
    engine = dataclasses.replace(limits, enable_prefix_caching=False, control_share=0.25)
    assert SchedulerConfig.from_engine_config(engine) == SchedulerConfig(100, 2, 7, 3.0, False, 0.25)


def test_pool_must_hold_one_sequence() -> None:
    with pytest.raises(AssertionError, match="cannot hold one sequence of 65"):
        Scheduler(make_config(), make_facts(num_pages=16, page_size=4, max_model_len=65))


# How requests enter


def test_prompt_too_long_is_refused_with_numbers_and_remedy() -> None:
    driver = toy(facts=make_facts(max_model_len=100))
    with pytest.raises(BadInputError, match=r"prompt has 100 tokens, limit 100, the answer included.*--max-model-len 128") as refusal:
        driver.add(make_request("a", (1,) * 100))
    assert refusal.value.param == "prompt"
    assert refusal.value.code == "context_length_exceeded"
    assert not driver.scheduler.has_unfinished
    driver.add(make_request("a", (1,) * 99))
    driver.run()
    assert driver.final("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [((), 1, "prompt"), ((1,), 0, "max_tokens")])
def test_empty_requests_are_refused(prompt: tuple[int, ...], max_tokens: int, param: str) -> None:
    with pytest.raises(BadInputError) as refusal:
        toy().add(make_request("a", prompt, max_tokens))
    assert refusal.value.param == param


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    driver = toy()
    driver.add(make_request("a", (1, 2)))
    with pytest.raises(BadInputError, match="'a' is in use"):
        driver.add(make_request("a", (3, 4)))
    driver.run()
    driver.add(make_request("a", (3, 4)))
    driver.run()
    driver.check_outputs()


# How they end


@both_depths
def test_a_stop_token_within_a_batch_of_drafts_ends_there(depth: int) -> None:
    driver = toy(depth, facts=make_facts(max_draft_length=5))
    prompt, output = distinct_output(driver, 5)
    driver.add(make_request("a", prompt, 5, stop_token_ids=(output[2],)))
    driver.run()
    assert driver.output("a") == output[:3]
    assert driver.final("a").finish_reason is FinishReason.STOP


@both_depths
def test_a_stop_token_at_the_length_limit_is_a_stop(depth: int) -> None:
    driver = toy(depth)
    prompt, output = distinct_output(driver, 3)
    driver.add(make_request("a", prompt, 3, stop_token_ids=(output[2],)), make_request("b", prompt, 3))
    driver.run()
    assert driver.output("a") == driver.output("b") == output
    assert driver.final("a").finish_reason is FinishReason.STOP
    assert driver.final("b").finish_reason is FinishReason.LENGTH


def test_ignore_eos_ignores_the_models_stop_tokens_but_not_the_requests() -> None:
    prompt, output = distinct_output(toy(), 4)
    driver = toy(facts=make_facts(eos_token_ids=(output[1],)))
    driver.add(
        make_request("eos", prompt, 4),
        make_request("ignore", prompt, 4, ignore_eos=True),
        make_request("own", prompt, 4, ignore_eos=True, stop_token_ids=(output[2],)),
    )
    driver.run()
    assert [len(driver.output(request_id)) for request_id in ("eos", "ignore", "own")] == [2, 4, 3]


@both_depths
def test_the_context_limit_ends_a_sequence_with_length(depth: int) -> None:
    driver = toy(depth, facts=make_facts(max_model_len=40, num_pages=10, max_draft_length=5))
    driver.add(make_request("a", tuple(range(38)), 100))
    driver.run()
    assert len(driver.output("a")) == 2
    assert driver.final("a").finish_reason is FinishReason.LENGTH
    driver.check_outputs()


@both_depths
def test_abort_while_waiting_running_and_in_flight(depth: int) -> None:
    driver = toy(depth, config=make_config(max_batch_size=2))
    driver.add(*(make_request(f"r{i}", (i, 2, 3), 50) for i in range(4)))
    driver.step()
    driver.abort("r3")  # waiting
    driver.plan()  # fills the queue: r0 and r1 are in flight
    num_free = driver.scheduler.stats().num_free_pages
    driver.abort("r0")
    assert driver.final("r0").finish_reason is FinishReason.ABORT
    assert driver.scheduler.stats().num_free_pages == num_free, "a step in flight still writes to its pages"
    while driver.in_flight:
        driver.commit()
    assert driver.scheduler.stats().num_free_pages > num_free
    driver.abort("r0")
    driver.abort("unknown")
    driver.abort("r1")  # running, nothing in flight
    driver.run()
    driver.check_outputs()
    reasons = [driver.final(f"r{i}").finish_reason for i in range(4)]
    assert reasons == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]


@both_depths
def test_fail_all_ends_every_request_with_the_reason(depth: int) -> None:
    driver = toy(depth, config=make_config(max_batch_size=2))
    driver.add(*(make_request(f"r{i}", (i, 2, 3), 50) for i in range(4)))
    driver.step()
    while len(driver.in_flight) < depth:
        driver.plan()
    driver.abort("r0")
    deltas = driver.scheduler.fail_all("the device is gone")
    assert {delta.request_id for delta in deltas} == {"r1", "r2", "r3"}
    assert all(delta.finish_reason is FinishReason.ERROR and delta.error == "the device is gone" for delta in deltas)
    assert all(delta.stats is not None for delta in deltas)
    assert not driver.scheduler.has_unfinished
    driver.check_drained()
    assert driver.scheduler.fail_all("again") == []


@both_depths
def test_a_third_cancelled_in_mid_stream_leaves_no_page_behind(depth: int) -> None:
    driver = toy(depth, drafter=ToyDrafter(0.7), facts=make_facts(num_pages=40, page_size=4, max_model_len=60, max_draft_length=4))
    for index in range(300):
        driver.add(make_request(f"r{index}", (index, index % 5, 3), 6, ignore_eos=True))
    for index in range(0, 300, 3):
        while not driver.deltas[f"r{index}"]:
            driver.step()
        driver.abort(f"r{index}")
    driver.run()
    driver.check_outputs()
    finals = [driver.final(f"r{index}").finish_reason for index in range(300)]
    assert finals.count(FinishReason.ABORT) > 60
    assert driver.scheduler.stats().num_free_pages == 40


def test_outcomes_must_come_in_order() -> None:
    driver = toy(2)
    driver.add(make_request("a", (1, 2), 10))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    driver.executor.collect()
    with pytest.raises(AssertionError, match="step 0 is due"):
        driver.scheduler.commit(second, driver.executor.collect())


# An idle engine's wait for company


def test_an_idle_engine_waits_for_the_minimum_batch() -> None:
    driver = toy(config=make_config(min_batch_size=3, batch_wait_ms=50.0))
    driver.clock.now_s = 10.0
    assert driver.scheduler.next_wakeup_s() is None
    driver.add(arriving(make_request("a", (1, 2), 3), 10.0))
    assert driver.plan() is None
    assert driver.scheduler.next_wakeup_s() == pytest.approx(10.05)
    driver.clock.now_s = 10.02
    driver.add(arriving(make_request("b", (1, 2), 30), 10.02))
    assert driver.plan() is None
    assert driver.scheduler.next_wakeup_s() == pytest.approx(10.05), "the oldest decides"
    driver.add(arriving(make_request("c", (1, 2), 30), 10.02))
    assert driver.scheduler.next_wakeup_s() is None
    plan = driver.plan()
    assert plan is not None
    assert len(plan.admitted) == 3
    driver.commit()
    driver.add(arriving(make_request("d", (1, 2), 3), 10.02))
    plan = driver.plan()
    assert plan is not None
    assert len(plan.admitted) == 1, "a running batch never waits"


def test_the_wait_ends_with_time() -> None:
    driver = toy(config=make_config(min_batch_size=3, batch_wait_ms=50.0))
    driver.add(make_request("a", (1, 2), 3))
    driver.clock.now_s = 0.049
    assert driver.plan() is None
    driver.clock.now_s = 0.05
    assert driver.scheduler.next_wakeup_s() is None
    assert driver.plan() is not None


# Prefixes


@pytest.mark.parametrize("keeps_kv", [False, True])
@both_depths
def test_the_second_identical_prompt_computes_only_what_it_must(depth: int, keeps_kv: bool) -> None:
    driver = toy(depth, facts=make_facts(page_size=4, keeps_kv=keeps_kv))
    prompt = tuple(range(42))
    driver.add(make_request("a", prompt, 6))
    driver.run()
    num_draft_kv_tokens = driver.executor.num_draft_kv_tokens
    driver.add(make_request("b", prompt, 6))
    plan = driver.plan()
    assert plan is not None
    assert plan.admitted[0].num_computed_tokens == 40
    assert plan.admitted[0].num_draft_computed_tokens == (40 if keeps_kv else 0)
    assert plan.spans[0].num_new_tokens == 2
    driver.run()
    driver.check_outputs()
    stats = driver.scheduler.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (84, 40)
    assert stats.num_prompt_tokens == 84
    final = driver.final("b").stats
    assert final is not None
    assert final.num_cached_tokens == 40
    assert driver.executor.num_draft_kv_tokens - num_draft_kv_tokens <= 12, "the drafter does not run the prompt again"


@pytest.mark.parametrize(("num_tokens", "num_hit_tokens"), [(40, 36), (41, 40), (3, 0), (4, 0), (5, 4)])
def test_a_full_hit_leaves_one_page_only_if_it_must(num_tokens: int, num_hit_tokens: int) -> None:
    driver = toy(facts=make_facts(page_size=4))
    for request_id in ("a", "b"):
        driver.add(make_request(request_id, tuple(range(num_tokens)), 2))
        driver.run()
    assert driver.scheduler.stats().num_prefix_hit_tokens == num_hit_tokens
    driver.check_outputs()


def test_output_is_cached_too_and_serves_the_next_turn() -> None:
    driver = toy(facts=make_facts(page_size=4))
    driver.add(make_request("a", tuple(range(10)), 11, ignore_eos=True))
    driver.run()
    driver.add(make_request("b", (*range(10), *driver.output("a"), 7, 7), 2))
    driver.run()
    final = driver.final("b").stats
    assert final is not None
    assert final.num_cached_tokens == 20, "21 tokens were known, of which the last was never computed"


def test_running_sequences_share_pages() -> None:
    driver = toy(facts=make_facts(page_size=4, num_pages=64))
    prompt = tuple(range(40))
    driver.add(make_request("a", prompt, 40, ignore_eos=True))
    driver.step()
    num_used = 64 - driver.scheduler.stats().num_free_pages
    driver.add(make_request("b", (*prompt, 1), 40, ignore_eos=True))
    driver.step()
    assert 64 - driver.scheduler.stats().num_free_pages <= num_used + 3
    driver.run()
    driver.check_outputs()


def test_no_hits_across_salts_or_when_switched_off() -> None:
    prompt = tuple(range(40))
    salted = toy(facts=make_facts(page_size=4))
    for request_id, salt in (("a", "key 1"), ("b", "key 2")):
        salted.add(dataclasses.replace(make_request(request_id, prompt, 2), cache_salt=salt))
        salted.run()
    off = toy(config=make_config(enable_prefix_caching=False), facts=make_facts(page_size=4))
    for request_id in ("a", "b"):
        off.add(make_request(request_id, prompt, 2))
        off.run()
    assert salted.scheduler.stats().num_prefix_hit_tokens == off.scheduler.stats().num_prefix_hit_tokens == 0
    assert (salted.scheduler.stats().num_prefix_query_tokens, off.scheduler.stats().num_prefix_query_tokens) == (80, 0)


def test_the_drafters_half_is_filled_in_by_a_later_request() -> None:
    driver = toy(facts=make_facts(page_size=4, keeps_kv=True))
    prompt = tuple(range(41))
    halves: list[tuple[int, int]] = []
    for request_id, max_draft_length in (("plain", 0), ("spec", None), ("again", None)):
        driver.add(make_request(request_id, prompt, 6, ignore_eos=True, max_draft_length=max_draft_length))
        plan = driver.plan()
        assert plan is not None
        halves.append((plan.admitted[0].num_computed_tokens, plan.admitted[0].num_draft_computed_tokens))
        driver.run()
    assert halves == [(0, 0), (40, 0), (40, 40)]
    driver.check_outputs()


# Counters


def test_request_stats_and_times() -> None:
    driver = toy(drafter=ToyDrafter(1.0, 1.0), facts=make_facts(max_draft_length=3))
    driver.add(make_request("a", (1, 2, 3), 10, ignore_eos=True, max_draft_length=2))
    driver.clock.now_s = 1.0
    driver.plan()
    driver.clock.now_s = 3.0
    driver.commit()
    driver.clock.now_s = 8.0
    driver.run()
    stats = driver.final("a").stats
    assert stats is not None
    assert (stats.queue_ms, stats.prefill_ms, stats.decode_ms) == (1000.0, 2000.0, 5000.0)
    assert stats.max_draft_length == 2
    # 10 tokens: one from the prompt, then three steps of 2 accepted drafts and a bonus token
    assert stats.draft.num_spec_steps == 3
    assert stats.draft.num_draft_tokens == stats.draft.num_accepted_tokens == 6
    assert (stats.draft.accepted_histogram, stats.draft.histograms_by_draft_length) == ([0, 0, 3], {2: [0, 0, 3]})
    assert stats.draft.num_plain_steps == 0
    totals = driver.scheduler.stats()
    assert (totals.num_steps, totals.num_generation_tokens, totals.num_drafts) == (4, 10, 3)
    assert totals.num_accepted_tokens_per_pos == [3, 3, 0]
    assert totals.step_s == pytest.approx(0.015)
    assert totals.last_step_s == 8.0


def test_a_request_aborted_in_the_queue_only_queued() -> None:
    driver = toy()
    driver.add(make_request("a", (1, 2, 3), 10))
    driver.clock.now_s = 2.0
    driver.abort("a")
    stats = driver.final("a").stats
    assert stats is not None
    assert (stats.queue_ms, stats.prefill_ms, stats.decode_ms) == (2000.0, 0.0, 0.0)
    assert stats.draft.accepted_histogram == [0, 0, 0, 0]


def test_accepted_drafts_after_the_end_are_not_counted() -> None:
    driver = toy(facts=make_facts(max_draft_length=5))
    prompt, output = distinct_output(driver, 5)
    driver.add(make_request("a", prompt, 9, stop_token_ids=(output[2],)))
    driver.run()
    stats = driver.final("a").stats
    assert stats is not None
    assert driver.output("a") == output[:3]
    assert stats.draft.num_accepted_tokens == 2, "one token came with the prompt, two were accepted, three more went to nobody"


def test_gauges_and_copies() -> None:
    driver = toy(config=make_config(max_batch_size=1))
    driver.add(make_request("a", (1, 2, 3), 10), make_request("b", (1, 2, 3), 10))
    driver.step()
    before = driver.scheduler.stats()
    assert (before.num_running, before.num_waiting, before.num_pages) == (1, 1, 64)
    snapshot = dataclasses.replace(before, num_accepted_tokens_per_pos=list(before.num_accepted_tokens_per_pos))
    driver.run()
    assert before == snapshot


def test_a_build_without_a_drafter_plans_no_drafts() -> None:
    driver = Driver(dataclasses.replace(make_facts(max_draft_length=5), drafter="none"), make_config())
    driver.add(make_request("a", (1, 2, 3), 10))
    driver.run()
    assert all(span.draft_budget == 0 for plan in driver.plans for span in plan.spans)
    stats = driver.final("a").stats
    assert stats is not None and stats.max_draft_length == 0
    assert stats.draft.accepted_histogram == [0]


def test_no_field_that_leaves_or_rests_can_hold_a_draft() -> None:
    """Invariant (5): ids of tokens stand only where they are committed truth."""
    for noun in (Request, Sequence, StepPlan):
        for field in dataclasses.fields(noun):
            is_draft_stats = field.name == "draft_stats"
            assert is_draft_stats or "draft" not in field.name or field.name in {"max_draft_length", "num_draft_computed_tokens"}
