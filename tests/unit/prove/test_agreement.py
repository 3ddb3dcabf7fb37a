"""Accounts that agree are left alone; each planted lie is named."""

from dataclasses import replace

import pytest

from paceline.prove.agreement import Account, acceptance_disagreements, different_answers
from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord

CHUNKS = (1, 3, 1, 4, 2)  # the prompt's token, then four steps with 2, 0, 3 and 1 accepted drafts


def record(arm: Arm = Arm.SPECULATIVE, place: int = 1, chunks: tuple[int, ...] = CHUNKS) -> RequestRecord:
    if arm is Arm.BASELINE:
        chunks = (1,) * sum(chunks)
        acceptance = Acceptance(0, 0, 0, (0,), 0, len(chunks) - 1, 0)
    else:
        lengths = [chunk - 1 for chunk in chunks[1:]]
        histogram = tuple(lengths.count(length) for length in range(4))
        acceptance = Acceptance(len(lengths), 3 * len(lengths), sum(lengths), histogram, 3, 0, 0)
    return RequestRecord(
        arm, Phase.MEASURE, 1, 0, place, f"{place:032d}", "qa", 0, 0.0, tuple(float(i) for i in range(len(chunks))), chunks, 9.0, 5, 0,
        sum(chunks), "stop", 200, None, "some text", acceptance=acceptance,
    )  # fmt: skip


def run(records: list[RequestRecord], factor: float = 1.0, num_more_tokens: int = 0) -> BlockRun:
    accounts = [each.acceptance for each in records if each.acceptance is not None]
    after = {
        "vllm:spec_decode_num_drafts_total": 100 + factor * sum(each.num_spec_steps for each in accounts),
        "vllm:spec_decode_num_draft_tokens_total": 100 + factor * sum(each.num_draft_tokens for each in accounts),
        "vllm:spec_decode_num_accepted_tokens_total": 100 + factor * sum(each.num_accepted_draft_tokens for each in accounts),
        "vllm:generation_tokens_total": 100 + num_more_tokens + sum(each.num_output_tokens for each in records),
    }
    first = records[0]
    return BlockRun(first.arm, Phase.MEASURE, 1, 0, first.place, 0.0, 9.0, dict.fromkeys(after, 100.0), after)


def accounts(records: list[RequestRecord], runs: list[BlockRun]) -> list[Account]:
    return [found.account for found in acceptance_disagreements(records, runs)]


def test_what_agrees() -> None:
    records = [record(Arm.BASELINE, 0), record(place=1)]
    assert accounts(records, [run(records[:1]), run(records[1:])]) == []
    assert accounts([replace(each, acceptance=None, chunk_tokens=()) for each in records], []) == [], "nothing to compare"


def test_a_last_step_that_the_answers_end_cut_short_agrees() -> None:
    """Its accepted drafts are counted by some servers whole, by ours as far as they were received, and then without the last token."""
    cut = record(chunks=(1, 4, 4, 2))
    assert cut.acceptance is not None
    for accepted in (7, 8, 9):
        histogram = {7: (0, 1, 0, 2), 8: (0, 0, 1, 2), 9: (0, 0, 0, 3)}[accepted]
        whole = replace(cut, acceptance=replace(cut.acceptance, num_accepted_draft_tokens=accepted, histogram=histogram))
        assert accounts([whole], []) == []


@pytest.mark.parametrize("num_accepted", [0, 3, 12])
def test_counts_of_drafts_that_chunks_deny(num_accepted: int) -> None:
    lying = record()
    assert lying.acceptance is not None
    lying = replace(lying, acceptance=replace(lying.acceptance, num_accepted_draft_tokens=num_accepted))
    assert accounts([lying], []) == [Account.CHUNKS]
    coalesced = replace(lying, chunk_tokens=(6, 5), chunk_times_s=(0.0, 1.0))
    assert accounts([coalesced], []) == [Account.CHUNKS], "where a chunk is no step the tokens still are those of the steps"
    assert accounts([replace(record(), chunk_tokens=(6, 5), chunk_times_s=(0.0, 1.0))], []) == []


@pytest.mark.parametrize(("factor", "is_noticed"), [(0.98, True), (1.02, True), (2.0, True), (0.995, False), (1.005, False)])
def test_counters_of_the_server_within_one_percent(factor: float, is_noticed: bool) -> None:
    records = [record(place=1) for _ in range(500)]
    assert (Account.COUNTERS in accounts(records, [run(records, factor)])) == is_noticed


def test_counters_are_not_compared_where_a_request_broke_off() -> None:
    records = [record(place=1), replace(record(place=1), error="cut")]
    assert accounts(records, [run(records, factor=9.0)]) == []


def test_somebody_elses_traffic() -> None:
    records = [record(place=1)] * 10
    assert accounts(records, [run(records, num_more_tokens=5)]) == [Account.TRAFFIC]
    assert accounts(records, [run(records, num_more_tokens=1)]) == []


def test_a_baseline_that_drafts() -> None:
    drafting = replace(record(place=0), arm=Arm.BASELINE)
    (found,) = acceptance_disagreements([drafting, record(Arm.BASELINE, 2)], [])
    assert found.account is Account.BASELINE
    assert "1 of 2 answers" in found.text


def test_answers_that_differ_between_the_arms() -> None:
    base, other = record(Arm.BASELINE, 1), record(place=1)
    assert different_answers([base, other]) == ()
    (found,) = different_answers([base, replace(other, text="some test")])
    assert (found.num_same_chars, found.num_tokens) == (7, (11, 11))
    (found,) = different_answers([base, replace(other, num_output_tokens=12)])
    assert found.num_tokens == (11, 12)
    assert different_answers([base, replace(other, text="x", error="cut")]) == (), "not whole: an error, no difference"
