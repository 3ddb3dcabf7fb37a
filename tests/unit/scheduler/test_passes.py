"""How one step is filled: the order of the passes, bounds under overlap, drafts and catch-up, and who yields pages."""

from collections import deque
from collections.abc import Sequence

import pytest

from paceline.core.plan import Span, SpanKind, StepPlan
from paceline.scheduler.draft_length import DraftRow, FullDraftLength
from paceline.scheduler.passes import StepBuilder, StepLimits
from paceline.scheduler.residents import Residents
from paceline.scheduler.row import Row, new_row
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, make_config, make_facts, make_request

NEVER_RIGHT = ToyDrafter(0.0, 1.0)
ALWAYS_RIGHT = ToyDrafter(1.0, 1.0)


class SwitchedLength(FullDraftLength):
    """All or nothing, by a switch."""

    def __init__(self) -> None:
        self.is_on = True

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        return [row.limit if self.is_on else 0 for row in rows]


def planned(driver: Driver) -> StepPlan:
    plan = driver.plan()
    assert plan is not None
    return plan


def next_plan(driver: Driver) -> StepPlan:
    plan = planned(driver)
    driver.commit()
    return plan


def shape(span: Span) -> tuple[SpanKind, int, int, int]:
    return span.kind, span.start, span.num_new_tokens, span.draft_budget


# The four passes


def test_decode_then_running_prompts_then_admission_then_drafts() -> None:
    driver = Driver(make_facts(max_draft_length=3), make_config(max_num_batched_tokens=8, enable_prefix_caching=False), drafter=NEVER_RIGHT)
    driver.add(make_request("a", (1, 2, 3), 50, ignore_eos=True))
    next_plan(driver)
    driver.add(make_request("b", tuple(range(16)), 50, ignore_eos=True), make_request("c", (1, 2), 50, ignore_eos=True))
    decode, prefill = SpanKind.DECODE, SpanKind.PREFILL
    # b enters with what a leaves; there is nothing left for c, nor for drafts
    assert [shape(span) for span in next_plan(driver).spans] == [(decode, 3, 1, 0), (prefill, 0, 7, 0)]
    assert [shape(span) for span in next_plan(driver).spans] == [(decode, 4, 1, 0), (prefill, 7, 7, 0)]
    # the rest of b, then c, then drafts for a from the three tokens left
    last = next_plan(driver)
    assert [shape(span) for span in last.spans] == [(decode, 5, 1, 3), (prefill, 14, 2, 0), (prefill, 0, 2, 0)]
    assert [span.emits for span in last.spans] == [True, True, True]
    assert last.num_tokens_upper_bound == 8
    driver.run()
    driver.check_outputs()


def test_one_pending_token_is_a_decode_row_even_at_admission() -> None:
    driver = Driver(make_facts(max_draft_length=3), make_config(), drafter=ALWAYS_RIGHT)
    driver.add(make_request("a", (1,), 50, ignore_eos=True))
    (span,) = next_plan(driver).spans
    assert shape(span) == (SpanKind.DECODE, 0, 1, 3)
    assert len(driver.output("a")) == 4


def test_admission_is_first_come_first_served() -> None:
    driver = Driver(make_facts(num_pages=8, page_size=4, max_model_len=32), make_config())
    driver.add(make_request("a", (1,) * 14, 4), make_request("b", (2,) * 20, 4), make_request("c", (3,), 4))
    assert len(planned(driver).admitted) == 1, "c would fit, but b came before it"
    driver.run()
    driver.check_outputs()


def test_prompts_are_let_in_only_with_pages_for_all_of_them() -> None:
    driver = Driver(make_facts(num_pages=10, page_size=4, max_model_len=40), make_config(max_num_batched_tokens=4))
    driver.add(make_request("a", (1,) * 24, 2), make_request("b", (2,) * 24, 2))
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_prompt_is_let_in_only_with_a_spare_page_for_each_running_row() -> None:
    driver = Driver(make_facts(num_pages=4, page_size=4, max_model_len=16), make_config(enable_prefix_caching=False))
    driver.add(make_request("a", (1,) * 6, 6, ignore_eos=True), make_request("b", (2,) * 8, 6, ignore_eos=True))
    assert len(next_plan(driver).admitted) == 1, "b would fill the pool and a needs another page two tokens later"
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_slot_is_reused_in_the_plan_that_releases_it() -> None:
    driver = Driver(make_facts(), make_config(max_batch_size=1))
    driver.add(make_request("a", (1, 2), 1), make_request("b", (3, 4), 1))
    next_plan(driver)
    plan = next_plan(driver)
    assert plan.released_slots == (0,)
    assert [admission.slot for admission in plan.admitted] == [0]
    driver.check_drained()


def test_more_slots_than_budget_starves_nobody() -> None:
    driver = Driver(make_facts(max_draft_length=0), make_config(max_num_batched_tokens=2, max_batch_size=8))
    driver.add(*(make_request(f"r{i}", (i,), 10, ignore_eos=True) for i in range(4)))
    for _ in range(8):
        assert len(next_plan(driver).spans) == 2


# Draft budgets


def test_drafts_are_shared_evenly_and_the_first_share_rotates() -> None:
    driver = Driver(make_facts(max_draft_length=5), make_config(max_num_batched_tokens=7), drafter=NEVER_RIGHT)
    driver.add(*(make_request(f"r{i}", (i,), 50, ignore_eos=True) for i in range(3)))
    totals = {0: 0, 1: 0, 2: 0}
    for _ in range(12):
        budgets = {span.slot: span.draft_budget for span in next_plan(driver).spans}
        assert sorted(budgets.values()) == [1, 1, 2]
        for slot, budget in budgets.items():
            totals[slot] += budget
    assert set(totals.values()) == {16}


def test_a_request_caps_its_drafts() -> None:
    driver = Driver(make_facts(max_draft_length=4), make_config(), drafter=NEVER_RIGHT)
    for request_id, cap in (("none", None), ("zero", 0), ("two", 2), ("nine", 9)):
        driver.add(make_request(request_id, (1,), 50, ignore_eos=True, max_draft_length=cap))
    assert [span.draft_budget for span in next_plan(driver).spans] == [4, 0, 2, 4]


def test_drafts_never_exceed_what_max_tokens_can_use() -> None:
    driver = Driver(make_facts(max_draft_length=5), make_config(), drafter=NEVER_RIGHT)
    driver.add(make_request("a", (1, 2), 4, ignore_eos=True))
    assert [next_plan(driver).spans[0].draft_budget for _ in range(4)] == [0, 2, 1, 0]
    assert not driver.scheduler.has_unfinished


def test_drafts_stop_at_the_drafters_context() -> None:
    driver = Driver(make_facts(max_draft_length=4, keeps_kv=True, drafter_max_len=10), make_config(), drafter=NEVER_RIGHT)
    driver.add(make_request("a", (1,) * 6, 12, ignore_eos=True))
    spans = [next_plan(driver).spans[0] for _ in range(8)]
    assert [span.draft_budget for span in spans] == [0, 3, 2, 1, 0, 0, 0, 0]
    assert [span.draft_catch_up for span in spans] == [6, 1, 1, 1, 0, 0, 0, 0]
    driver.run()
    driver.check_outputs()


def test_few_free_pages_shrink_drafts_before_anyone_is_preempted() -> None:
    driver = Driver(make_facts(num_pages=4, page_size=2, max_model_len=8, max_draft_length=5), make_config(), drafter=NEVER_RIGHT)
    driver.add(make_request("a", (1,), 7, ignore_eos=True), make_request("b", (2,), 7, ignore_eos=True))
    first, second = next_plan(driver).spans
    # Two of four pages hold the pending tokens; the other two go to the drafts of whoever is first in turn.
    assert (first.draft_budget, second.draft_budget) == (5, 1)
    assert driver.scheduler.stats().num_free_pages == 2, "rejected drafts leave no pages behind"
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()
    driver.check_outputs()


# Overlap


def test_bounds_of_a_decode_span_planned_ahead() -> None:
    driver = Driver(make_facts(max_draft_length=3, page_size=4), make_config(), depth=2, drafter=ALWAYS_RIGHT)
    driver.add(make_request("a", (1, 2, 3), 50, ignore_eos=True))
    prefill = planned(driver).spans[0]
    assert (prefill.kind, prefill.start, prefill.start_max, prefill.emits) == (SpanKind.PREFILL, 0, 0, True)
    first = planned(driver).spans[0]
    assert (first.kind, first.start, first.start_max, first.draft_budget) == (SpanKind.DECODE, 3, 3, 3)
    driver.commit()
    second = planned(driver).spans[0]
    assert (second.start, second.start_max) == (4, 7)
    driver.commit()  # all three drafts were right: 8 tokens are committed, the second step starts at 7
    third = planned(driver).spans[0]
    assert (third.start, third.start_max) == (8, 11)


def test_prompt_chunks_follow_each_other_ahead_of_commits() -> None:
    driver = Driver(make_facts(), make_config(max_num_batched_tokens=5), depth=2)
    driver.add(make_request("a", tuple(range(11)), 5, ignore_eos=True))
    spans = [planned(driver).spans[0], planned(driver).spans[0]]
    driver.commit()
    spans.append(planned(driver).spans[0])
    assert [(span.kind, span.start, span.num_new_tokens, span.emits) for span in spans] == [
        (SpanKind.PREFILL, 0, 5, False),
        (SpanKind.PREFILL, 5, 5, False),
        (SpanKind.PREFILL, 10, 1, True),
    ]
    driver.run()
    driver.check_outputs()


def test_a_step_that_is_certainly_not_needed_is_not_planned() -> None:
    driver = Driver(make_facts(max_draft_length=0), make_config(), depth=2)
    driver.add(make_request("a", (1, 2), 2))
    assert planned(driver)
    assert planned(driver)
    assert driver.plan() is None, "two steps in flight yield the two tokens"


def test_nor_one_beyond_the_context_limit() -> None:
    driver = Driver(make_facts(num_pages=3, page_size=4, max_model_len=12, max_draft_length=0), make_config(), depth=2)
    driver.add(make_request("a", (1,) * 10, 50, ignore_eos=True))
    assert planned(driver)
    assert planned(driver)
    assert driver.plan() is None


def test_a_row_that_may_stand_at_the_context_limit_waits_for_the_commit() -> None:
    driver = Driver(make_facts(num_pages=3, page_size=4, max_model_len=12, max_draft_length=5), make_config(), depth=2, drafter=NEVER_RIGHT)
    driver.add(make_request("a", (1,) * 7, 50, ignore_eos=True))
    planned(driver)
    assert planned(driver).spans[0].draft_budget == 3
    driver.commit()
    assert shape(planned(driver).spans[0]) == (SpanKind.DECODE, 8, 1, 0)
    driver.run()
    assert len(driver.output("a")) == 5
    driver.check_outputs()


# Drafter catch-up


def test_catch_up_is_paid_from_the_budget_and_drafts_wait_for_it() -> None:
    config = make_config(max_num_batched_tokens=10, enable_prefix_caching=False)
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), config, drafter=NEVER_RIGHT)
    driver.add(make_request("a", tuple(range(20)), 50, ignore_eos=True))
    spans = [next_plan(driver).spans[0] for _ in range(6)]
    # Two chunks take the whole budget; then 9 spare tokens and the free one serve 21 tokens of catch-up in three steps.
    assert [(span.num_new_tokens, span.draft_catch_up, span.draft_budget) for span in spans] == [
        (10, 0, 0),
        (10, 0, 0),
        (1, 10, 0),
        (1, 10, 0),
        (1, 3, 3),
        (1, 1, 3),
    ]
    driver.run()
    driver.check_outputs()


def test_a_prompt_chunk_catches_up_with_what_is_left() -> None:
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), make_config(max_num_batched_tokens=30), drafter=ALWAYS_RIGHT)
    driver.add(make_request("a", tuple(range(20)), 50, ignore_eos=True))
    spans = [next_plan(driver).spans[0] for _ in range(4)]
    assert [(span.num_new_tokens, span.draft_catch_up, span.draft_budget) for span in spans] == [
        (20, 11, 0),
        (1, 10, 3),
        (1, 2, 3),  # all drafts accepted: the last one is pending beside the bonus token
        (1, 2, 3),
    ]


def test_a_row_without_a_share_does_not_run_the_drafter() -> None:
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), make_config(max_num_batched_tokens=4), drafter=NEVER_RIGHT)
    driver.add(*(make_request(f"r{i}", (i,), 50, ignore_eos=True) for i in range(3)))
    for _ in range(3):
        spans = next_plan(driver).spans
        assert sorted((span.draft_catch_up > 0, span.draft_budget) for span in spans)[:2] == [(False, 0), (False, 0)]


def test_a_chunk_in_flight_advances_the_drafter_by_what_it_catches_up() -> None:
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), make_config(max_num_batched_tokens=30), depth=2, drafter=ALWAYS_RIGHT)
    driver.add(make_request("a", tuple(range(20)), 50, ignore_eos=True))
    assert planned(driver).spans[0].draft_catch_up == 11
    ahead = planned(driver).spans[0]
    assert (ahead.draft_catch_up, ahead.draft_budget) == (10, 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_without_drafts_the_drafter_does_not_run_and_later_catches_up(depth: int) -> None:
    policy = SwitchedLength()
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), make_config(), depth=depth, policy=policy, drafter=ALWAYS_RIGHT)
    driver.add(make_request("a", (1, 2, 3, 4), 60, ignore_eos=True))
    for _ in range(3):
        driver.step()
    policy.is_on = False
    for _ in range(depth):  # those planned before the switch
        driver.step()
    num_run = driver.executor.num_draft_kv_tokens
    for _ in range(10):
        driver.step()
    assert driver.executor.num_draft_kv_tokens == num_run
    policy.is_on = True
    plan = driver.plan() if depth == 1 else (driver.step() and driver.plans[-1])
    assert plan
    driver.step()
    span = driver.plans[-1].spans[0]
    assert span.draft_budget == 3
    catch_ups = [span.draft_catch_up for plan in driver.plans[-3:] for span in plan.spans]
    assert max(catch_ups) >= 11
    driver.run()
    driver.check_outputs()


def test_no_catch_up_for_requests_that_will_never_draft() -> None:
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=True), make_config())
    driver.add(make_request("zero", (1, 2, 3), 9, max_draft_length=0), make_request("short", (4, 5, 6), 2))
    driver.run()
    assert driver.executor.num_draft_kv_tokens == 0


# Pages under pressure


def crowded(depth: int, *, num_pages: int, max_model_len: int, max_batch_size: int = 8) -> Driver:
    facts = make_facts(num_pages=num_pages, page_size=2, max_model_len=max_model_len, max_draft_length=0)
    return Driver(facts, make_config(enable_prefix_caching=False, max_batch_size=max_batch_size), depth=depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_youngest_yields_and_is_first_in_the_queue(depth: int) -> None:
    driver = crowded(depth, num_pages=10, max_model_len=20, max_batch_size=3)
    for request_id in ("a", "b", "c", "d"):
        driver.add(make_request(request_id, (1,), 12, ignore_eos=True))
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step()
    assert [row.request.request_id for row in driver.scheduler._waiting] == ["c", "d"]
    driver.run()
    driver.check_outputs()
    num_preemptions = {request_id: stats.num_preemptions for request_id in "abcd" if (stats := driver.final(request_id).stats)}
    assert num_preemptions["a"] == 0
    assert num_preemptions["c"] >= 1
    assert sum(num_preemptions.values()) == driver.scheduler.stats().num_preemptions


def test_a_preempted_sequence_resumes_as_prefill_over_prompt_and_output() -> None:
    driver = crowded(1, num_pages=6, max_model_len=12)
    driver.add(make_request("a", (1, 2), 10, ignore_eos=True), make_request("b", (3, 4), 10, ignore_eos=True))
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step()
    num_output = len(driver.output("b"))
    assert num_output > 1
    while driver.plans[-1].admitted == ():
        driver.step()
    (admission,) = driver.plans[-1].admitted
    assert admission.token_ids == (3, 4, *driver.output("b")[:num_output])
    assert (admission.num_prompt_tokens, admission.num_computed_tokens) == (2, 0)
    span = driver.plans[-1].spans[-1]
    assert (span.kind, span.start, span.num_new_tokens, span.emits) == (SpanKind.PREFILL, 0, 2 + num_output, True)
    driver.run()
    driver.check_outputs()


def test_ahead_of_commits_juniors_sit_out_until_one_can_yield() -> None:
    driver = crowded(2, num_pages=6, max_model_len=12)
    driver.add(make_request("a", (1, 2), 10, ignore_eos=True), make_request("b", (3, 4), 10, ignore_eos=True))
    while driver.scheduler.stats().num_preemptions == 0:
        assert driver.step()
    # Without the pause b would be in flight at each plan, and a would wait until b ends.
    assert len(driver.output("a")) < 10
    assert len(driver.output("b")) < 10
    driver.run()
    driver.check_outputs()


def test_an_older_prompt_without_a_page_takes_it_from_a_younger_decode_row() -> None:
    """Rare: it takes a prompt that was preempted, let in again, and met by juniors that had been in flight."""
    residents = Residents(num_slots=2, num_pages=2, page_size=2, enable_prefix_caching=False)
    prompt, junior = (new_row(make_request(name, (1,) * size), order, 0, ()) for order, (name, size) in enumerate((("p", 4), ("j", 2))))
    for row, num_computed_tokens in ((junior, 1), (prompt, 2)):
        residents.admit(row, [])
        assert residents.grow(row, 2)
        row.sequence.num_computed_tokens = num_computed_tokens
    residents.take_changes()
    waiting: deque[Row] = deque()
    limits = StepLimits(max_num_batched_tokens=8, max_num_running=2, max_model_len=4, drafter_max_len=4, drafter_keeps_kv=False)
    builder = StepBuilder(residents, waiting, FullDraftLength(), limits, 0)
    assert [(work.row, work.start, work.num_new_tokens) for work in builder.build()] == [(prompt, 2, 2)]
    assert builder.preempted == [junior] == list(waiting)
