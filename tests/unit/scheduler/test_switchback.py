"""The switchback on a fake clock: it finds the speed-up that is there, within its share of the time, by its rules for changing rows."""

from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.scheduler.observation import StepObservation
from paceline.scheduler.speedup import MIN_TRIPLES, SpeedupEstimator, Triple
from paceline.scheduler.switchback import NUM_BLOCK_STEPS, NUM_DROPPED_STEPS, NUM_FLANK_STEPS, Switchback
from tests.fakes.traffic import Law, Traffic

NOISY = Law(noise=0.15, correlation=0.6, drift=0.3, stall_share=0.01)


class Recorder(Switchback):
    """Keeps all triples."""

    def __init__(self, share: float = 0.2, drafter_keeps_kv: bool = False, seed: int = 0) -> None:
        self.triples: list[Triple] = []
        super().__init__(share, drafter_keeps_kv, seed, RecordingEstimator(self.triples))


class RecordingEstimator(SpeedupEstimator):
    def __init__(self, triples: list[Triple]) -> None:
        super().__init__()
        self._triples = triples

    def add(self, triple: Triple) -> None:
        self._triples.append(triple)
        super().add(triple)


def blocks(steps: list[StepObservation]) -> list[list[StepObservation]]:
    """Runs of consecutive control steps."""
    found: list[list[StepObservation]] = []
    for before, step in zip([None, *steps], steps, strict=False):
        if step.is_control:
            if before is None or not before.is_control:
                found.append([])
            found[-1].append(step)
    return found


def pooled_ratio(triples: list[Triple]) -> float:
    tokens = sum(t.num_speculative_tokens for t in triples) / sum(t.speculative_row_s for t in triples)
    return tokens / (sum(t.num_control_tokens for t in triples) / sum(t.control_row_s for t in triples))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("acceptance", "speculative_ms"), [(0.8, 16.0), (0.3, 16.0)])
def test_it_finds_the_true_ratio_under_noise_drift_and_stalls(acceptance: float, speculative_ms: float, depth: int) -> None:
    law = replace(NOISY, acceptance=acceptance, speculative_ms=speculative_ms)
    traffic = Traffic(Recorder(0.3), law, num_rows=4, depth=depth)
    traffic.run(5000)
    (speedup,) = traffic.switchback.speedups()
    assert speedup.band in ("rows=3-4,context=1k-4k", "rows=3-4,context=4k-16k")
    assert speedup.num_triples >= MIN_TRIPLES
    assert speedup.low < law.speedup < speedup.high
    assert speedup.high / speedup.low < 1.15
    assert (law.speedup > 1) == (speedup.low > 1) == (speedup.high > 1), "a gain and a loss are told apart"


def test_requests_without_drafts_inside_a_drafting_batch_tell_a_wrong_ratio_and_the_switchback_the_right_one() -> None:
    """The planted control arm: some rows of the batch decode plainly. They wait for the others' drafts, so a loss looks like a gain."""
    law = Law(acceptance=0.5, speculative_ms=26.0)
    planted = Traffic(Recorder(share=0.0), law, num_rows=8, num_plain_rows=4)
    planted.run(2000)
    drafting, plain = ([row for row in planted.rows if row.may_draft is may_draft] for may_draft in (True, False))
    rates = [sum(row.num_committed for row in rows) / sum(row.time_ms for row in rows) for rows in (drafting, plain)]
    assert rates[0] / rates[1] == pytest.approx(law.acceptance_length, rel=0.05), "acceptance length, whatever drafting costs"

    switchback = Recorder()
    Traffic(switchback, law, num_rows=8).run(4000)
    assert pooled_ratio(switchback.triples) == pytest.approx(law.speedup, rel=0.03)
    assert law.speedup < 0.8 < 1.5 < law.acceptance_length


@pytest.mark.parametrize(("share", "least"), [(0.02, 0.8), (0.1, 0.8), (0.3, 0.6)])
def test_control_blocks_take_their_share_and_cost_no_more_than_share_times_gain(share: float, least: float) -> None:
    law = Law(acceptance=1.0, num_drafts=2)
    traffic = Traffic(Switchback(share, False), law)
    traffic.run(max(int(300 / share), 3000))
    assert traffic.control_ms <= share * traffic.total_ms
    assert traffic.control_ms >= least * share * traffic.total_ms, "and they make use of it"
    num_tokens = sum(step.num_emitted_tokens for step in traffic.steps)
    all_speculative_ms = num_tokens / traffic.num_rows / law.acceptance_length * law.speculative_ms
    cost = 1 - all_speculative_ms / traffic.total_ms
    assert 0.5 * share * (1 - 1 / law.speedup) < cost <= share * (1 - 1 / law.speedup)


def test_blocks_hold_sixteen_counted_steps_at_random_distances_which_the_seed_fixes() -> None:
    def starts(seed: int) -> list[int]:
        traffic = Traffic(Switchback(0.1, False, seed), Law(), seed=1)
        traffic.run(3000)
        lengths = {len(block) for block in blocks(traffic.steps)}
        assert lengths == {NUM_BLOCK_STEPS + NUM_DROPPED_STEPS}
        flags = [step.is_control for step in traffic.steps]
        return [i for i in range(1, len(flags)) if flags[i] and not flags[i - 1]]

    first = starts(0)
    assert first == starts(0) != starts(1)
    gaps = [later - sooner for sooner, later in pairwise(first)]
    assert len(first) > 10
    assert max(gaps) > 1.5 * min(gaps)


def test_no_block_where_nothing_drafts() -> None:
    for traffic in (
        Traffic(Switchback(0.0, False), Law()),
        Traffic(Switchback(0.3, False), Law(), is_on=False),
        Traffic(Switchback(0.3, False), Law(), num_rows=4, num_plain_rows=4),
    ):
        traffic.run(3000)
        assert traffic.control_ms == 0

    traffic = Traffic(Switchback(0.3, False), Law())
    traffic.run(1000)
    traffic.is_on = False  # the guard steps in
    num_before = len(blocks(traffic.steps))
    assert num_before > 3
    traffic.run(1000)
    assert len(blocks(traffic.steps)) <= num_before + 1, "at most the one that was about to end or begin"


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_the_catch_up_of_the_drafter_is_charged_to_speculation(keeps_kv: bool) -> None:
    law = Law(catch_up_ms=2.0)
    switchback = Recorder(drafter_keeps_kv=keeps_kv)
    Traffic(switchback, law).run(6000)
    # A triple has 16 speculative steps, and the drafter misses the 18 tokens of the control block.
    charged = law.acceptance_length * law.plain_ms / (law.speculative_ms + 18 * law.catch_up_ms / 16)
    expected = charged if keeps_kv else law.speedup
    assert pooled_ratio(switchback.triples) == pytest.approx(expected, rel=0.02)
    assert charged < 0.9 * law.speedup


@pytest.mark.parametrize(("num_rows", "output_tokens"), [(16, 256), (4, 300), (1, 96)])
def test_rows_that_come_and_go_leave_enough_triples_and_the_right_ratio(num_rows: int, output_tokens: int) -> None:
    switchback = Recorder(0.3)
    traffic = Traffic(switchback, NOISY, num_rows=num_rows, output_tokens=output_tokens)
    traffic.run(5000)
    triples = switchback.triples
    assert len(triples) >= MIN_TRIPLES
    assert pooled_ratio(triples) == pytest.approx(NOISY.speedup, rel=0.05)
    assert all(triple.num_control_tokens >= NUM_BLOCK_STEPS for triple in triples)
    assert traffic.control_ms <= 0.3 * traffic.total_ms


# The rules, step by step


class Script:
    """Feeds single steps to a switchback whose block is due whenever its rules allow one."""

    def __init__(self, keeps_kv: bool = False) -> None:
        self.switchback = Recorder(0.5, keeps_kv)
        self.switchback._balance_ms = 1e9

    def step(
        self,
        tokens: dict[int, int],
        num_steps: int = 1,
        *,
        ms: float = 10.0,
        has_prefill: bool = False,
        ended: int = 0,
        num_allotted: int = 5,
    ) -> list[bool]:
        """Plans and commits steps; returns which of them were control steps. `ended`: rows that ended in the step."""
        flags: list[bool] = []
        for _ in range(num_steps):
            is_control = self.switchback.is_control(lambda _plain, _speculative: True)
            flags.append(is_control)
            self.switchback.observe_step(
                StepObservation(
                    num_rows=len(tokens) + ended,
                    num_context_tokens=100 * len(tokens),
                    num_drafted_tokens=0 if is_control else 5,
                    num_emitted_tokens=sum(tokens.values()),
                    num_target_tokens=len(tokens),
                    has_prefill=has_prefill,
                    is_control=is_control,
                    duration_ms=ms,
                    propose_ms=0.0,
                    num_allotted_tokens=0 if is_control else num_allotted,
                    tokens_by_row=tokens,
                )
            )
        return flags

    def begin(self, tokens: dict[int, int]) -> None:
        """Up to the last step before a control block."""
        while not self.switchback._may_begin():
            assert self.step(tokens) == [False]

    def control(self, tokens: dict[int, int]) -> None:
        assert all(self.step(tokens, NUM_BLOCK_STEPS + NUM_DROPPED_STEPS))

    def after(self, tokens: dict[int, int]) -> None:
        assert not any(self.step(tokens, NUM_DROPPED_STEPS + NUM_FLANK_STEPS))


def test_a_triple_counts_what_it_should() -> None:
    script = Script()
    script.begin({1: 3, 2: 5})
    assert script.step({1: 1, 2: 1}, NUM_DROPPED_STEPS, ms=77) == [True, True]
    assert all(script.step({1: 1, 2: 1}, NUM_BLOCK_STEPS, ms=10))
    script.step({1: 9, 2: 9}, NUM_DROPPED_STEPS, ms=77)
    assert not any(script.step({1: 3, 2: 5}, NUM_FLANK_STEPS, ms=20))
    (triple,) = script.switchback.triples
    row_s = 2 * NUM_FLANK_STEPS * (0.010 + 0.020)
    assert triple == Triple("rows=2,context=0-1k", 8 * 2 * NUM_FLANK_STEPS, pytest.approx(row_s), 2 * 16, pytest.approx(2 * 16 * 0.010))


def test_steps_with_a_prompt_do_not_count_and_a_block_of_nothing_else_ends() -> None:
    script = Script()
    script.begin({1: 2})
    script.step({1: 1}, NUM_DROPPED_STEPS)
    assert all(script.step({1: 1}, 10, ms=500, has_prefill=True))
    assert all(script.step({1: 1}, NUM_BLOCK_STEPS))
    script.step({1: 2}, NUM_DROPPED_STEPS + 4)
    script.step({1: 2}, 10, ms=500, has_prefill=True)
    script.step({1: 2}, 4)
    (triple,) = script.switchback.triples
    assert triple.control_row_s == triple.speculative_row_s == pytest.approx(0.16)

    while script.switchback._num_steps_to_wait != 1:
        script.step({1: 2})
    script.step({1: 2}, ms=500, has_prefill=True)
    script.control({1: 1})
    script.after({1: 2})
    assert script.switchback.triples[1].speculative_row_s == pytest.approx(0.16)

    script.begin({1: 2})
    flags = script.step({1: 1}, 60, has_prefill=True)
    assert sum(flags) == 2 * (NUM_BLOCK_STEPS + NUM_DROPPED_STEPS) + 1
    assert len(script.switchback.triples) == 2


def test_steps_that_may_not_draft_bring_no_block_and_earn_none() -> None:
    script = Script()
    assert not any(script.step({1: 1}, 100, num_allotted=0))
    for _ in range(20):
        assert not any([*script.step({1: 1}, 5, num_allotted=0), *script.step({1: 1}, 3)]), "most steps may not"

    traffic = Traffic(Recorder(0.1), Law(), is_on=False)
    traffic.run(1000)
    traffic.is_on = True
    traffic.run(180)
    assert traffic.control_ms == 0, "18 steps are a tenth of 180 at the soonest"
    traffic.run(300)
    assert traffic.control_ms > 0


def test_rows_that_join_or_end_are_cut() -> None:
    script = Script()
    script.begin({1: 2, 2: 2, 3: 2})
    assert all(script.step({1: 1, 2: 1, 3: 1}, NUM_DROPPED_STEPS + 8))
    assert all(script.step({1: 1, 2: 1}, 1, ended=1))
    assert all(script.step({1: 1, 2: 1, 4: 1}, 7))
    script.after({1: 2, 2: 2, 4: 7})
    (triple,) = script.switchback.triples
    assert (triple.num_control_tokens, triple.num_speculative_tokens) == (2 * 16, 2 * 2 * 2 * NUM_FLANK_STEPS)
    assert triple.speculative_row_s == pytest.approx(2 * 0.010 * 2 * NUM_FLANK_STEPS), "two rows' share of the time"


def test_a_control_block_ends_with_more_than_half_of_its_rows() -> None:
    script = Script()
    script.begin({1: 2, 2: 2})
    assert all(script.step({1: 1, 2: 1}, 5))
    assert script.step({2: 1}, ended=1) == [True], "half of them may go"
    assert script.step({2: 1, 3: 1, 4: 1}, 2) == [True, False]
    script.step({2: 2, 3: 2, 4: 2}, NUM_FLANK_STEPS)
    assert not script.switchback.triples


def test_a_triple_falls_with_the_block_behind_it() -> None:
    script = Script()
    script.begin({1: 2})
    script.control({1: 1})
    script.step({1: 2}, NUM_DROPPED_STEPS + NUM_FLANK_STEPS - 1)
    script.step({}, ended=1)
    assert not script.switchback.triples


def test_triples_share_no_block_and_nothing_begins_without_one_before() -> None:
    script = Script()
    script.begin({1: 2})
    script.control({1: 1})
    script.after({1: 2})
    assert len(script.switchback.triples) == 1
    assert not any(script.step({1: 2}, NUM_FLANK_STEPS))

    script = Script()
    script.step({1: 2, 2: 2, 3: 2}, NUM_FLANK_STEPS)
    while script.switchback._num_steps_to_wait != 1:
        script.step({1: 2, 2: 2, 3: 2})
    assert not any(script.step({1: 2, 4: 2, 5: 2, 6: 2, 7: 2}, NUM_FLANK_STEPS)), "the last steps have a fifth of their rows in common"
    assert script.step({1: 1, 4: 1, 5: 1, 6: 1, 7: 1}) == [True]


def test_the_block_before_is_not_the_one_that_made_a_block_due() -> None:
    """A slow step earns more, so it is likelier to be the one that brings a block: counted, it would make speculation look slow."""
    script = Script()
    script.switchback._balance_ms = 0.0
    while script.switchback._num_steps_to_wait is None:
        script.step({1: 2}, ms=10 if script.switchback._balance_ms < 150 else 1000)
    slow = script.switchback._balance_ms
    assert slow > 150
    script.begin({1: 2})
    script.control({1: 1})
    script.after({1: 2})
    assert script.switchback.triples[0].speculative_row_s == pytest.approx(0.160)


def test_rows_that_are_about_to_end_bring_no_block_and_nothing_is_saved_up_meanwhile() -> None:
    traffic = Traffic(Recorder(0.2), Law(), num_rows=2, output_tokens=40)
    assert traffic.law.num_drafts == 4, "a row needs 18 + 10 x 5 tokens"
    traffic.run(1000)
    assert traffic.control_ms == 0
    traffic.output_tokens = 600
    before_ms = traffic.total_ms
    traffic.run(1000)
    assert 0 < traffic.control_ms < 0.2 * (traffic.total_ms - before_ms) + 2 * 18 * traffic.law.speculative_ms
