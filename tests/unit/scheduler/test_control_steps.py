"""Steps planned without drafts on purpose, and what the scheduler reports of every committed step."""

import pytest

from paceline.core.plan import SpanKind
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, ListedControl, make_config, make_facts, make_request

ALWAYS_RIGHT = ToyDrafter(1.0, 1.0)


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_control_step_runs_no_drafter_at_all_and_says_so_when_committed(keeps_kv: bool) -> None:
    control = ListedControl((False, False, True))
    driver = Driver(make_facts(max_draft_length=3, keeps_kv=keeps_kv), make_config(), drafter=ALWAYS_RIGHT, control=control)
    driver.add(make_request("a", (1, 2, 3), 40, ignore_eos=True), make_request("b", (4, 5), 50, ignore_eos=True))
    driver.run()
    driver.check_outputs()
    assert [step.is_control for step in control.steps] == [i % 3 == 2 for i in range(driver.num_steps)]
    for plan, step in zip(driver.plans, control.steps, strict=True):
        assert step.num_drafted_tokens <= sum(span.draft_budget for span in plan.spans)
        if step.is_control:
            assert all(span.draft_budget == span.draft_catch_up == 0 for span in plan.spans)
    assert sum(step.num_drafted_tokens for step in control.steps) > 20, "the steps between draft on"


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
        assert (step.duration_ms, step.propose_ms) == (4.0, 1.0)
