"""Which blocks may be compared."""

from dataclasses import replace

from paceline.prove.pairing import compare
from paceline.prove.record import Arm, Phase
from paceline.prove.results import Work
from tests.fakes.answers import answer, block_run

WHOLE = [answer(arm, block=block, question_id=str(block)) for block in range(3) for arm in Arm]
RUNS = [block_run(arm, 2.0, block=block) for block in range(3) for arm in Arm]


def test_whole_blocks_are_paired_by_question() -> None:
    (comparison,) = compare(WHOLE, RUNS)
    assert (len(comparison.blocks), comparison.num_left_out) == (3, 0)
    assert [block.is_baseline_first for block in comparison.blocks] == [True, False, True]
    assert all(base.question_id == other.question_id and base.arm is not other.arm for b in comparison.blocks for base, other in b.pairs)
    assert comparison.work is Work.IDENTICAL
    longer = [replace(WHOLE[0], num_output_tokens=WHOLE[0].num_output_tokens + 1), *WHOLE[1:]]
    assert compare(longer, RUNS)[0].work is Work.PER_TOKEN


def test_a_failed_request_takes_its_block_out_of_both_arms() -> None:
    broken = [replace(WHOLE[0], error="stream cut"), *WHOLE[1:]]
    (comparison,) = compare(broken, RUNS)
    assert (len(comparison.blocks), comparison.num_left_out) == (2, 1)


def test_a_block_that_one_arm_did_not_finish_is_left_out() -> None:
    assert compare(WHOLE, RUNS[:-1])[0].num_left_out == 1
    assert compare(WHOLE[:-1], RUNS)[0].num_left_out == 1


def test_warm_up_and_open_loop_are_not_compared() -> None:
    assert compare([replace(record, phase=Phase.WARM_UP) for record in WHOLE], RUNS) == ()
    assert compare([replace(record, concurrency=0, rate_per_s=2.0) for record in WHOLE], RUNS) == ()


def test_a_question_asked_twice_in_a_block_is_two_pairs() -> None:
    twice = [replace(record, sent_s=float(number)) for record in WHOLE[:2] for number in range(2)]
    (comparison,) = compare(twice, RUNS[:2])
    assert comparison.num_pairs == 2
