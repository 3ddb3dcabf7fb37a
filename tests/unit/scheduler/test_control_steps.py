"""Steps planned without drafts on purpose, and what the scheduler reports of every committed step."""

import random
from collections import deque

import pytest

from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import SpanKind, StepPlan
from paceline.scheduler.draft_length import FullDraftLength
from paceline.scheduler.scheduler import Scheduler
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, ListedControl, make_config, make_facts, make_request

ALWAYS_RIGHT = ToyDrafter(1.0, 1.0)


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_control_step_drafts_for_nobody_and_says_so_when_committed(keeps_kv: bool) -> None:
    control = ListedControl((False, False, True))
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=keeps_kv), make_config(), drafter=ALWAYS_RIGHT, control=control)
    driver.add(make_request("a", (1, 2, 3), 40, ignore_eos=True), make_request("b", (4, 5), 50, ignore_eos=True))
    driver.run()
    driver.check_outputs()
    assert [step.is_control for step in control.steps] == [i % 3 == 2 for i in range(driver.num_steps)]
    for plan, step in zip(driver.plans, control.steps, strict=True):
        assert step.num_drafted_tokens <= sum(span.draft_budget for span in plan.spans)
        if step.is_control:
            assert all(span.draft_budget == span.draft_catch_up == 0 for span in plan.spans if span.kind is SpanKind.DECODE)
    assert sum(step.num_drafted_tokens for step in control.steps) > 20, "the steps between draft on"


def test_the_drafter_keeps_up_with_prompts_in_control_steps() -> None:
    driver = Driver(make_facts(keeps_kv=True), make_config(max_num_batched_tokens=128), control=ListedControl((True,)))
    driver.add(make_request("a", tuple(range(40)), 10, ignore_eos=True))
    driver.run()
    assert driver.executor.num_draft_kv_tokens == 40, "the prompt, and none of the output"
    driver = Driver(make_facts(keeps_kv=True), make_config(max_num_batched_tokens=128), control=ListedControl((True,)))
    driver.add(make_request("a", tuple(range(40)), 10, ignore_eos=True, max_draft_length=0))
    driver.run()
    assert driver.executor.num_draft_kv_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_count_the_control_steps_that_held_drafts_back_from_them(depth: int) -> None:
    control = ListedControl((False, True, True))
    driver = Driver(make_facts(max_draft_length=3), make_config(), drafter=ALWAYS_RIGHT, depth=depth, control=control)
    driver.add(make_request("a", (1, 2, 3), 40, ignore_eos=True), make_request("b", (4, 5), 40, ignore_eos=True, max_draft_length=0))
    driver.run()
    finals = [driver.final(name).stats for name in "ab"]
    drafts = [final.draft for final in finals if final is not None]
    assert 10 < drafts[0].num_control_steps <= drafts[0].num_plain_steps <= drafts[0].num_control_steps + 1, "the last token needs no draft"
    assert drafts[0].num_control_steps == sum(delta.is_control for delta in driver.deltas["a"])
    assert drafts[0].num_spec_steps + drafts[0].num_accepted_tokens + drafts[0].num_plain_steps == 39
    assert (drafts[1].num_control_steps, drafts[1].num_plain_steps) == (0, 39), "a request without drafts misses none"
    assert not any(delta.is_control for delta in driver.deltas["b"])


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_the_scheduler_reach_the_statistics(depth: int) -> None:
    """With steps that all take as long, the speed-up is the acceptance length: here 1.5 tokens more than one."""
    scheduler = Scheduler(make_config(control_share=0.4), make_facts(num_pages=2000, max_draft_length=3), FullDraftLength())
    rng = random.Random(1)
    for number in range(4):
        scheduler.add(make_request(f"{number}", (1, number), 1000, ignore_eos=True))
    in_flight: deque[StepPlan] = deque()
    num_control = num_steps = 0
    while scheduler.has_unfinished:
        while len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        plan = in_flight.popleft()
        accepted = [rng.randint(0, span.draft_budget) for span in plan.spans]
        slots = tuple(
            SlotOutcome(span.slot, (7,) * (num + 1), span.draft_budget, num, 0) for span, num in zip(plan.spans, accepted, strict=True)
        )
        num_drafted = sum(slot.num_drafted for slot in slots)
        stats = StepStats(1.0, 2.0, 1.0, 4.0, len(slots), len(slots) + num_drafted, num_drafted, sum(accepted))
        deltas = scheduler.commit(plan, StepOutcome(plan.step_id, slots, stats))
        num_control += any(delta.is_control for delta in deltas)
        num_steps += 1
        if num_steps < 3000 and any(delta.finish_reason for delta in deltas):
            scheduler.add(make_request(f"{num_steps}", (1, num_steps), 1000, ignore_eos=True))
    (speedup,) = scheduler.stats().speedups
    assert speedup.band == "rows=3-4,context=0-1k"
    assert speedup.low < 2.5 < speedup.high
    assert speedup.ratio == pytest.approx(2.5, rel=0.06)
    assert 0.3 * num_steps < num_control < 0.4 * num_steps


@pytest.mark.parametrize("depth", [1, 2])
def test_an_observation_counts_what_was_run_and_committed(depth: int) -> None:
    control = ListedControl((False,))
    driver = Driver(
        make_facts(max_draft_length=3), make_config(max_num_batched_tokens=12), drafter=ALWAYS_RIGHT, depth=depth, control=control
    )
    driver.add(make_request("a", (1, 2, 3), 21, ignore_eos=True), make_request("b", tuple(range(30)), 9, ignore_eos=True))
    driver.run()
    assert sum(step.num_emitted_tokens for step in control.steps) == 21 + 9 - 2, "each prompt's last chunk yields the first token"
    for plan, step in zip(driver.plans, control.steps, strict=True):
        decode = [span for span in plan.spans if span.kind is SpanKind.DECODE]
        assert step.num_rows == len(decode)
        assert step.has_prefill == (len(decode) < len(plan.spans))
        assert step.num_target_tokens == sum(span.num_new_tokens for span in plan.spans) + step.num_drafted_tokens
        assert sum(span.start + 1 for span in decode) <= step.num_context_tokens <= sum(span.start_max + 1 for span in decode)
        assert (step.duration_ms, step.propose_ms) == ((4.0, 1.0) if step.num_allotted_tokens else (3.0, 0.0))
        assert sum(step.tokens_by_row.values()) <= step.num_emitted_tokens, "a row that ends has no entry"
    assert {row for step in control.steps for row in step.tokens_by_row} == {0, 1}, "rows by order of arrival"
