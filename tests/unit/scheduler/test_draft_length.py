from paceline.scheduler.draft_length import FIRST_PAUSE_STEPS, MAX_PAUSE_STEPS, BackoffDraftLength, DraftRow
from tests.fakes.fake_executor import ToyDrafter
from tests.unit.scheduler.driver import Driver, make_config, make_facts, make_request


def length(policy: BackoffDraftLength, limit: int = 5) -> int:
    return policy.allot([DraftRow("a", limit, 1, 0)], 64)[0]


def pause_length(policy: BackoffDraftLength) -> int:
    num_steps = 0
    while length(policy) == 0:
        policy.observe("a", 0, 0)
        num_steps += 1
        assert num_steps < 1000
    return num_steps


def test_length_falls_with_misses_in_a_row_then_pauses() -> None:
    policy = BackoffDraftLength()
    lengths: list[int] = []
    for _ in range(4):
        lengths.append(length(policy))
        policy.observe("a", lengths[-1], 0)
    assert lengths == [5, 5, 2, 1]
    assert length(policy) == 0


def test_any_accepted_token_restores_the_full_length() -> None:
    policy = BackoffDraftLength()
    for _ in range(3):
        policy.observe("a", 5, 0)
    policy.observe("a", 1, 1)
    assert length(policy) == 5
    policy.observe("a", 5, 0)
    assert length(policy) == 5


def test_pauses_double_up_to_a_limit_and_end_with_a_trial_of_one() -> None:
    policy = BackoffDraftLength()
    for _ in range(4):
        policy.observe("a", 5, 0)
    pauses: list[int] = []
    for _ in range(6):
        pauses.append(pause_length(policy))
        assert length(policy) == 1
        policy.observe("a", 1, 0)
    assert pauses == [FIRST_PAUSE_STEPS, 8, 16, MAX_PAUSE_STEPS, MAX_PAUSE_STEPS, MAX_PAUSE_STEPS]


def test_steps_planned_before_the_pause_do_not_lengthen_it() -> None:
    policy = BackoffDraftLength()
    for _ in range(5):  # the fifth was in flight when the pause began
        policy.observe("a", 5, 0)
    assert pause_length(policy) == FIRST_PAUSE_STEPS


def test_steps_without_a_proposal_change_nothing() -> None:
    policy = BackoffDraftLength()
    for _ in range(50):
        policy.observe("a", 0, 0)
    assert length(policy) == 5


def test_zero_limit_stays_zero() -> None:
    policy = BackoffDraftLength()
    policy.observe("a", 5, 0)
    assert length(policy, 0) == 0


def test_a_useless_drafter_costs_few_drafts_and_a_request_is_forgotten() -> None:
    policy = BackoffDraftLength()
    driver = Driver(make_facts(max_draft_length=5), make_config(), policy=policy, drafter=ToyDrafter(0.0, 1.0))
    driver.add(make_request("a", (1, 2), 120, ignore_eos=True))
    driver.run()
    driver.check_outputs()
    stats = driver.final("a").stats
    assert stats is not None
    assert stats.draft.num_draft_tokens <= 20
    assert stats.draft.num_plain_steps >= 105
    assert policy._records == {}


def test_a_good_drafter_is_never_held_back() -> None:
    driver = Driver(make_facts(max_draft_length=5), make_config(), policy=BackoffDraftLength())
    driver.add(make_request("a", (1, 2), 121, ignore_eos=True))
    driver.run()
    stats = driver.final("a").stats
    assert stats is not None
    assert stats.draft.num_accepted_tokens == 100
    assert driver.num_steps == 21
