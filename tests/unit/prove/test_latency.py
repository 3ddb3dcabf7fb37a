"""Times by tokens, on answers counted by hand."""

import pytest

from paceline.prove.latency import inter_token_ms, num_decode_steps, percentiles, tpot_ms, ttft_ms, user_tps
from paceline.prove.record import Acceptance, Arm
from tests.fakes.answers import answer


def test_first_chunk_of_five_tokens_is_no_time_per_token() -> None:
    """5 tokens at 1.0 s, then 4 in 0.8 s: 200 ms each, not 0.8 s / 8 tokens, nor a chunk gap of 400 ms."""
    record = answer(times_s=(1.0, 1.4, 1.8), tokens=(5, 2, 2))
    assert ttft_ms(record) == 1000.0
    assert tpot_ms(record) == pytest.approx(200.0)
    assert user_tps(record) == pytest.approx(5.0)
    assert inter_token_ms(record) == (pytest.approx([200.0, 200.0]), [2, 2])


def test_time_of_a_chunk_without_tokens_belongs_to_the_next() -> None:
    assert inter_token_ms(answer(times_s=(1.0, 1.5, 2.0), tokens=(1, 0, 4))) == (pytest.approx([250.0]), [4])


def test_without_counts_per_chunk_the_first_chunk_is_one_token_and_no_time_between_tokens_is_known() -> None:
    record = answer(times_s=(1.0, 1.5, 2.0), tokens=(), num_output_tokens=11)
    assert tpot_ms(record) == pytest.approx(100.0)
    assert inter_token_ms(record) == ([], [])


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    assert tpot_ms(answer(times_s=(1.0,), tokens=(7,))) is None
    assert num_decode_steps(answer(times_s=(1.0,), tokens=(7,))) is None


def test_steps_follow_from_accepted_drafts_however_the_stream_is_cut() -> None:
    """13 tokens: 1 from the prompt, then 4 steps that accept 2 each: 12 tokens."""
    told = Acceptance(4, 12, 8, (0, 0, 4, 0))
    one_chunk_per_step = answer(times_s=(1, 2, 3, 4, 5), tokens=(1, 3, 3, 3, 3), acceptance=told)
    two_steps_per_chunk = answer(times_s=(1, 3, 5), tokens=(1, 6, 6), acceptance=told)
    split_chunks = answer(times_s=(1, 2, 2.1, 3, 4, 4.2, 5), tokens=(1, 2, 1, 3, 1, 2, 3), acceptance=told)
    for record in (one_chunk_per_step, two_steps_per_chunk, split_chunks):
        assert num_decode_steps(record) == pytest.approx(4.0)


def test_first_chunk_that_holds_steps_takes_them_out() -> None:
    told = Acceptance(4, 12, 8, (0, 0, 4, 0))
    assert num_decode_steps(answer(times_s=(2, 5), tokens=(4, 9), acceptance=told)) == pytest.approx(3.0)


def test_a_plain_answer_has_a_step_per_token() -> None:
    assert num_decode_steps(answer(Arm.BASELINE, times_s=(1, 2), tokens=(1, 9))) == 9


def test_percentiles_count_each_value_as_often_as_it_occurs() -> None:
    found = percentiles([1.0, 100.0], [99, 1])
    assert found is not None
    assert (found.p50, found.p95) == (1.0, 1.0)
    assert percentiles([]) is None
