"""Arms that answer differently are given equal work, and then a known truth is found, which is missed without."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Dataset
from paceline.prove.journal import Journal
from paceline.prove.judgement import JudgeOptions, Objectives
from paceline.prove.measure import measure
from paceline.prove.pairing import compare
from paceline.prove.plan import Measurement, Plan, Progress, ReplayMode
from paceline.prove.record import Arm, Phase, RecordedTurn, RequestRecord
from paceline.prove.recorded import note_before, read_recorded
from paceline.prove.replay import num_lost, played, read_recording
from paceline.prove.results import OVERALL, Verdict, Work
from paceline.prove.speedup import analyse
from paceline.prove.verdict import judge
from tests.fakes.mock_openai import Behaviour, Clock, MockOpenAi
from tests.fakes.prove_prompts import make_dataset

PLAN = Plan("", make_dataset(16), concurrencies=(1, 4), num_blocks=4, max_tokens=24, warm_up_tokens=4)
INEXACT = Behaviour(is_exact=False, honours_length=True, num_answer_tokens=10)
OPTIONS = JudgeOptions(PLAN.dataset.prompts, is_quick=True, num_resamples=199)


@pytest.fixture(autouse=True)
def no_wait_for_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.prove.counters._POLL_S", 0.001)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Measure a mock server with a plan changed in places; the journal is raw.jsonl."""

    async def run(server: MockOpenAi, progress: Callable[[Progress], None] = lambda _: None, **given: Any) -> Measurement:
        path = tmp_path / "raw.jsonl"
        path.unlink(missing_ok=True)
        with Journal(path) as journal:
            note_before(journal, PLAN.dataset, is_quick=True, criteria=None, objectives=Objectives())
            return await measure(replace(PLAN, base_url=server.url, **given), journal, progress)

    return run


def measured(got: Measurement, phase: Phase = Phase.MEASURE) -> list[RequestRecord]:
    return [record for record in got.records if record.phase is phase]


def ratio(got: Measurement) -> tuple[float, Work]:
    (cell,) = [cell for cell in analyse(compare(got.records, got.runs), 199, 0).speedup if cell.category == OVERALL]
    return cell.ratio, cell.work


def total_seconds(got: Measurement, arm: Arm) -> float:
    return sum(run.end_s - run.start_s for run in got.runs if run.arm is arm and run.phase is Phase.MEASURE)


@pytest.mark.parametrize("truth", [1.0, 2.0])
async def test_a_known_truth_is_found_by_replay_and_missed_without(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, truth: float
) -> None:
    """The accelerated arm answers in half the tokens, and steps grow longer with the text, so its tokens are the cheap ones."""
    clock = Clock()
    monkeypatch.setattr("paceline.prove.client.time", clock)
    behaviour = replace(INEXACT, draft_length=0, growth_s=1e-3, drafted_length=0.5, drafting_cost=1 / truth, clock=clock)
    async with MockOpenAi(behaviour) as server:
        without = await run(server, concurrencies=(1,), replay=ReplayMode.OFF)
        with_replay = await run(server, concurrencies=(1,))
    per_token, work = ratio(without)
    assert work is Work.PER_TOKEN
    assert per_token > 1.7 * truth
    assert total_seconds(without, Arm.BASELINE) / total_seconds(without, Arm.SPECULATIVE) > 3.5 * truth, "and in all still more"
    assert ratio(with_replay) == (pytest.approx(truth, rel=1e-6), Work.REPLAYED)


async def test_arms_that_turn_out_to_differ_are_measured_again_with_equal_work(run: Callable[..., Any], tmp_path: Path) -> None:
    """From the third block on; what was measured before is kept, and counts nowhere."""
    behaviour = replace(INEXACT, is_exact=True)

    def progress(told: Progress) -> None:
        if told.stage.startswith("concurrency 1, block 3"):
            behaviour.is_exact = False
        assert told.num_done <= told.num_total

    async with MockOpenAi(behaviour) as server:
        got = await run(server, progress)
    expected = sum(len(prompt.turns) for prompt in PLAN.dataset.prompts)
    assert 0 < len(measured(got, Phase.SET_ASIDE)) < 2 * expected
    assert [record.arm for record in measured(got, Phase.RECORD)] == [Arm.BASELINE] * expected
    assert len(measured(got)) == 2 * 2 * expected, "everything, at both concurrencies"
    assert all(record.is_replayed for record in measured(got))
    assert "differently at concurrency 1, block 3" in got.replay_why
    assert [run.place for run in got.runs] == list(range(len(got.runs))), "in the order of time"
    for comparison in compare(got.records, got.runs):
        assert comparison.work is Work.REPLAYED
        assert comparison.num_pairs == expected
        for base, other in [pair for block in comparison.blocks for pair in block.pairs]:
            assert base.num_output_tokens == other.num_output_tokens == base.max_tokens == other.max_tokens
            assert base.num_prompt_tokens == other.num_prompt_tokens
            assert base.num_cached_tokens == other.num_cached_tokens == 0, "an arm that repeats the recording finds no more than the other"
    assert any(base.text != other.text for one in compare(got.records, got.runs) for block in one.blocks for base, other in block.pairs)
    assert read_recorded(tmp_path / "raw.jsonl").measurement == got
    judgement = judge(got, None, OPTIONS)
    assert judgement.verdict is not Verdict.INVALID, judgement.reasons
    (reason,) = [reason for reason in judgement.reasons if "replayed in both arms" in reason]
    assert reason.startswith("at concurrency 1, 4, conversations were recorded once")
    assert got.replay_why in reason
    assert not any("answered alike" in warning for warning in got.warnings)


async def test_both_arms_are_asked_for_the_recording(run: Callable[..., Any]) -> None:
    async with MockOpenAi(replace(INEXACT, is_lossless=False)) as server:
        got = await run(server, concurrencies=(2,))
        asked = [
            each.body for each in server.asked if "min_tokens" in each.body and each.body["messages"][0]["content"].startswith("what is")
        ]
    assert "lossless: false" in got.replay_why
    assert not measured(got, Phase.SET_ASIDE), "known from the start"
    recorded = {(record.question_id, record.turn): record for record in measured(got, Phase.RECORD)}
    sides: dict[bool, list[str]] = {True: [], False: []}
    for body in asked:
        assert body["max_tokens"] == body["min_tokens"]
        assert body["ignore_eos"] is True
        is_plain = body.pop("max_draft_length", None) == 0
        body.pop("cache_salt")
        sides[is_plain].append(repr(sorted(body.items())))
    assert sorted(sides[True]) == sorted(sides[False])
    for record in measured(got):
        assert record.num_output_tokens == recorded[record.question_id, record.turn].num_output_tokens
    later = {body["messages"][1]["content"] for body in asked if len(body["messages"]) == 3}
    assert later == {record.text for (_, turn), record in recorded.items() if turn == 0 and record.question_id[-1] in "05"}


async def test_exact_arms_record_nothing(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(honours_length=True)) as server:
        got = await run(server, temperature=0.7)
    assert {record.phase for record in got.records} == {Phase.WARM_UP, Phase.MEASURE}
    assert got.replay_why == ""
    assert any("over identical tokens" in reason for reason in judge(got, None, OPTIONS).reasons)


async def test_sampling_without_coupled_verification_is_replayed_from_the_start(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(honours_length=True, verification="ratio")) as server:
        sampled = await run(server, temperature=0.7, concurrencies=(1,))
        greedy = await run(server, concurrencies=(1,))
    assert "coupled" in sampled.replay_why
    assert all(record.is_replayed for record in measured(sampled))
    assert not greedy.replay_why


async def test_a_server_that_cannot_keep_to_a_length_is_compared_per_token(run: Callable[..., Any]) -> None:
    async with MockOpenAi(replace(INEXACT, honours_length=False, drafted_length=0.95)) as server:
        got = await run(server, concurrencies=(2,))
        with pytest.raises(BadInputError, match="leave --replay out"):
            await run(server, replay=ReplayMode.ON)
    assert not any(record.is_replayed for record in got.records)
    assert "cannot be asked for answers of a given length" in got.replay_why
    (reason,) = [reason for reason in judge(got, None, OPTIONS).reasons if "per output token" in reason]
    assert got.replay_why in reason
    assert any("answered alike" in warning for warning in got.warnings)


async def test_full_answers_to_single_questions_are_equal_work_as_they_are(run: Callable[..., Any]) -> None:
    async with MockOpenAi(INEXACT) as server:
        got = await run(server, dataset=make_dataset(8, every_multi=99), concurrencies=(2,), ignore_eos=True)
    # number 0 alone has two turns in such a set
    assert "differently" in got.replay_why
    single = Dataset("single", "qualitative", make_dataset(9, every_multi=99).prompts[1:])
    async with MockOpenAi(INEXACT) as server:
        got = await run(server, dataset=single, concurrencies=(2,), ignore_eos=True)
    assert not any(record.is_replayed for record in got.records)
    assert {comparison.work for comparison in compare(got.records, got.runs)} == {Work.EQUAL_LENGTHS}


async def test_a_recording_is_played_again_later(run: Callable[..., Any], tmp_path: Path) -> None:
    async with MockOpenAi(INEXACT) as server:
        first = await run(server, concurrencies=(2,))
        kept = tmp_path / "kept.jsonl"
        (tmp_path / "raw.jsonl").rename(kept)
        recording = read_recording(kept, PLAN.dataset)
        again = await run(server, concurrencies=(3,), replay=ReplayMode.ON, recording=recording)
    lengths = [{(r.question_id, r.turn): r.max_tokens for r in measured(got)} for got in (first, again)]
    assert lengths[0] == lengths[1]
    assert not measured(again, Phase.RECORD)
    assert read_recording(tmp_path / "raw.jsonl", PLAN.dataset) == recording, "each file stands for itself"
    with pytest.raises(BadInputError, match="other prompts"):
        read_recording(kept, make_dataset(20))


async def test_a_file_without_a_recording_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    async with MockOpenAi() as server:
        await run(server, concurrencies=(1,))
    with pytest.raises(BadInputError, match="holds no recorded conversations"):
        read_recording(tmp_path / "raw.jsonl", PLAN.dataset)


async def test_what_fails_while_it_is_recorded_is_left_out_and_counted(run: Callable[..., Any]) -> None:
    async with MockOpenAi(replace(INEXACT, is_lossless=False, faults={"what is 3": "http_500", "and after 0": "cut"})) as server:
        got = await run(server, concurrencies=(2,))
    assert got.is_complete
    turns = {(record.question_id[-2:], record.turn) for record in measured(got)}
    assert ("03", 0) not in turns
    assert ("00", 0) in turns
    assert ("00", 1) not in turns
    assert any("2 conversations are not recorded to their end" in warning for warning in got.warnings)
    judgement = judge(got, None, OPTIONS)
    assert judgement.verdict is Verdict.INVALID
    assert any("failed while conversations were recorded" in reason for reason in judgement.reasons)


@pytest.mark.parametrize("keeps_apart", [True, False])
async def test_the_other_servers_cache_is_warmed_alike(run: Callable[..., Any], keeps_apart: bool) -> None:
    """Where salts do nothing, the recording pass has put all prompts into one server's cache; the other one reads them too."""
    behaviour = replace(INEXACT, keeps_salts_apart=keeps_apart)
    plain = replace(behaviour, draft_length=0, drafted_length=0.9)
    async with MockOpenAi(behaviour) as server, MockOpenAi(plain) as other:
        got = await run(server, concurrencies=(2,), baseline_url=other.url)
    arms = {record.arm for record in measured(got, Phase.RECORD)}
    assert arms == ({Arm.BASELINE} if keeps_apart else set(Arm))
    assert any("holds the plain arm's own answers" in warning for warning in got.warnings) is not keeps_apart
    assert all(record.is_replayed for record in measured(got))
    assert judge(got, None, OPTIONS).verdict is not Verdict.INVALID


async def test_a_server_that_stops_short_all_the_same_is_told(run: Callable[..., Any]) -> None:
    behaviour = replace(INEXACT, is_lossless=False)

    def progress(told: Progress) -> None:
        if "block" in told.stage:
            behaviour.honours_length, behaviour.drafted_length = False, 0.97

    async with MockOpenAi(behaviour) as server:
        got = await run(server, progress, concurrencies=(1,))
    assert any("did not have the length that was asked for" in warning for warning in got.warnings)
    assert ratio(got)[1] is Work.PER_TOKEN


async def test_a_replayed_answer_of_full_length_needs_no_counting(run: Callable[..., Any]) -> None:
    """Of servers without usage: tokens of a text need not be those that it was made of."""
    behaviour = replace(INEXACT, owner="me", has_usage=False, gives_token_ids=False, gives_acceptance=False, has_counters=False)
    plain = replace(behaviour, draft_length=0, drafted_length=0.9)

    def progress(told: Progress) -> None:
        plain.num_miscounted = 1 if "block" in told.stage else 0

    async with MockOpenAi(behaviour) as server, MockOpenAi(plain) as other:
        got = await run(server, progress, concurrencies=(2,), baseline_url=other.url, replay=ReplayMode.ON)
    assert len(measured(got)) == len(measured(got, Phase.RECORD)) > 0
    assert ratio(got)[1] is Work.REPLAYED


async def test_an_open_loop_is_replayed_as_well(run: Callable[..., Any]) -> None:
    async with MockOpenAi(INEXACT) as server:
        got = await run(server, concurrencies=(), rates_per_s=(300.0, 600.0))
    assert {record.rate_per_s for record in measured(got)} == {300.0, 600.0}
    assert all(record.is_replayed for record in measured(got))
    arms = {(arm.rate_per_s, arm.arm): arm.output_tps for arm in judge(got, None, OPTIONS).arms if arm.category == OVERALL}
    assert len(arms) == 4
    assert all(arms.values()), "each rate has its own wall time"


def test_played_prompts_end_where_their_recording_does() -> None:
    prompts = make_dataset(6).prompts
    turn = RecordedTurn("so", 3)
    recording = {prompts[0].question_id: (turn,), prompts[1].question_id: (turn,)}
    assert [(prompt.question_id[-1], len(prompt.turns)) for prompt in played(prompts, recording)] == [("0", 1), ("1", 1)]
    assert num_lost(prompts, recording) == 5
