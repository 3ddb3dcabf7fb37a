"""Whole measurements of the mock server, judged from the server's side, and of our own application with a fake engine."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, ServerConfig
from paceline.core.request import Request
from paceline.errors import BadInputError, MissingError
from paceline.prove import load
from paceline.prove.agreement import Account, acceptance_disagreements, different_answers
from paceline.prove.client import ChatClient
from paceline.prove.journal import Journal, read_journal
from paceline.prove.measure import measure
from paceline.prove.plan import Measurement, Plan, Progress
from paceline.prove.record import Arm, Phase
from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.fakes.mock_openai import Behaviour, MockOpenAi
from tests.fakes.prove_prompts import make_dataset
from tests.fakes.served import Served
from tests.fakes.tiny_models import make_tiny_model

PLAN = Plan("", make_dataset(12), concurrencies=(1, 4), num_blocks=4, max_tokens=24, warm_up_tokens=8)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Measure a mock server with a plan changed in places."""

    async def run(server: MockOpenAi, progress: Callable[[Progress], None] = lambda _: None, **given: Any) -> Measurement:
        with Journal(tmp_path / "raw.jsonl") as journal:
            return await measure(replace(PLAN, base_url=server.url, **given), journal, progress)

    return run


def measured(server: MockOpenAi) -> int:
    """Where the questions of the plan begin among what the server was asked, behind the probes."""
    return next(place for place, asked in enumerate(server.asked) if asked.question.startswith("what is"))


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [(Behaviour(), None), (Behaviour(keeps_salts_apart=False), "does not keep requests"), (Behaviour(tells_cached=False), "does not show")],
)
async def test_one_cache_for_both_arms_is_warned_of(run: Callable[..., Any], behaviour: Behaviour, words: str | None) -> None:
    async with MockOpenAi(behaviour) as server:
        got = await run(server, concurrencies=(1,), num_blocks=1, max_tokens=2)
    found = [warning for warning in got.warnings if "cache_salt" in warning]
    assert len(found) == (words is not None)
    assert all(str(words) in warning for warning in found)


async def test_two_servers_share_no_cache(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(keeps_salts_apart=False)) as server, MockOpenAi(Behaviour(draft_length=0)) as plain:
        got = await run(server, concurrencies=(1,), num_blocks=1, max_tokens=2, baseline_url=plain.url)
    assert not any("cache_salt" in warning for warning in got.warnings)


async def test_a_whole_measurement(run: Callable[..., Any], tmp_path: Path) -> None:
    told: list[Progress] = []
    async with MockOpenAi() as server:
        got = await run(server, told.append)
    assert got.is_complete
    assert all(record.error is None for record in got.records)
    expected = sum(len(prompt.turns) for prompt in PLAN.dataset.prompts)
    counts = Counter((record.phase, record.arm, record.concurrency) for record in got.records)
    for arm in Arm:
        assert counts[Phase.MEASURE, arm, 1] == expected, "each prompt once, every turn of it"
        assert counts[Phase.WARM_UP, arm, 4] == 4
    assert (told[-1].num_done, told[-1].seconds_left) == (told[-1].num_total, 0)
    assert [progress.num_done for progress in told] == list(range(1, len(got.records) + 1))
    assert len(got.runs) == 2 * 2 * (4 + 1)
    contents = read_journal(tmp_path / "raw.jsonl")
    assert (contents.records, contents.runs) == (got.records, got.runs)
    assert contents.notes[0]["plan"]["dataset_sha256"] == PLAN.dataset.sha256
    assert acceptance_disagreements(got.records, got.runs) == ()
    assert different_answers(got.records) == ()
    assert got.draft_lengths == {1: None, 4: None}


async def test_one_arm_is_in_flight_at_a_time_at_full_concurrency(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:
        got = await run(server)
        assert server.in_flight_together() == {(True, True), (False, False)}
        assert server.most_in_flight() == 4
    ends = sorted((run.start_s, run.end_s) for run in got.runs)
    assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(ends)), "a drain between two runs"


async def test_overlapping_arms_would_be_noticed(run: Callable[..., Any]) -> None:
    """The planted fault: two measurements of one arm each, at the same time."""
    async with MockOpenAi() as server:
        both = await asyncio.gather(*(run(server, arms=(arm,), concurrencies=(4,)) for arm in Arm))
        assert (True, False) in server.in_flight_together()
        for one in both:
            assert Account.TRAFFIC in {found.account for found in acceptance_disagreements(one.records, one.runs)}


async def test_both_arms_are_asked_the_same_but_for_drafts_and_salt(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:
        await run(server, concurrencies=(1,), temperature=0.7)
        asked = [each.body for each in server.asked[measured(server) :]]
    sides: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for body in asked:
        is_plain = body.pop("max_draft_length", None) == 0
        assert body.pop("cache_salt")
        sides[is_plain][repr(sorted(body.items()))] += 1
    assert sides[True] == sides[False]
    assert {body["temperature"] for body in asked} == {0.7}
    assert len({body["seed"] for body in asked if body["max_tokens"] == 24}) == 15, "one for each turn, the same in both arms"


async def test_no_run_reads_what_another_run_has_cached(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:
        await run(server)
        again = await run(server)  # nor what an earlier measurement has
    salts = [(each.body["cache_salt"], each.is_plain) for each in server.asked[measured(server) :] if "cache_salt" in each.body]
    assert len({salt for salt, _ in salts if len(salt) > 10}) == 2 * 20
    for record in again.records:
        assert (record.num_cached_tokens > 0) == (record.turn > 0), "the turns before, and nothing else"


async def test_multi_turn_history_is_the_arms_own(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:
        got = await run(server, concurrencies=(2,))
    texts = {(record.place, record.question_id, record.turn): record.text for record in got.records}
    later = [each.body for each in server.asked if len(each.body["messages"]) == 3]
    assert later
    assert {body["messages"][1]["content"] for body in later} <= set(texts.values())
    assert all([message["role"] for message in body["messages"]] == ["user", "assistant", "user"] for body in later)


async def test_what_breaks_is_a_record_and_the_rest_goes_on(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(faults={"what is 3": "cut", "what is 5": "http_500", "and after 0": "bad_finish"})) as server:
        got = await run(server, concurrencies=(3,))
    failed = Counter((record.question_id[-1], record.turn) for record in got.records if record.error and record.phase is Phase.MEASURE)
    assert failed == {("3", 0): 2, ("5", 0): 2, ("0", 1): 2}
    assert "5" not in {record.question_id[-1] for record in got.records if record.turn == 1 and record.question_id.endswith("05")}
    assert got.is_complete
    assert len(got.runs) == 2 * (4 + 1)


async def test_a_server_that_goes_away_leaves_error_records(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:

        def progress(told: Progress) -> None:
            if told.num_done == 12:
                server.behaviour.faults[""] = "cut"

        got = await run(server, progress, concurrencies=(1,))
    assert got.is_complete
    assert sum(record.error is None for record in got.records) == 12


async def test_ctrl_c_keeps_what_was_measured(run: Callable[..., Any], tmp_path: Path) -> None:
    async with MockOpenAi(Behaviour(step_s=0.001)) as server:
        task: asyncio.Task[Measurement]

        def progress(told: Progress) -> None:
            if told.num_done == 15:
                task.cancel()

        task = asyncio.create_task(run(server, progress))
        got = await task
        assert not task.cancelled()
    assert not got.is_complete
    assert len(got.records) == 15
    assert read_journal(tmp_path / "raw.jsonl").records == got.records
    assert read_journal(tmp_path / "raw.jsonl").notes[-1]["is_complete"] is False


async def test_an_open_loop_measures_both_arms_at_the_same_arrivals(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, float, str]] = []
    arrivals_s = load.arrivals_s

    def noted(number: int, rate_per_s: float, seed: str) -> tuple[float, ...]:
        seeds.append((number, rate_per_s, seed))
        return arrivals_s(number, rate_per_s, seed)

    monkeypatch.setattr(load, "arrivals_s", noted)
    async with MockOpenAi() as server:
        got = await run(server, concurrencies=(), rates_per_s=(500.0,))
    assert {(record.concurrency, record.rate_per_s) for record in got.records} == {(0, 500.0)}
    assert {run.rate_per_s for run in got.runs} == {500.0}
    assert seeds[2::2] == seeds[3::2]
    assert len(set(seeds[2:])) == 4


async def test_the_fastest_draft_length_of_the_pilot_is_measured(run: Callable[..., Any], tmp_path: Path) -> None:
    async with MockOpenAi(Behaviour(step_s=0.001, draft_length=7)) as server:
        got = await run(server, concurrencies=(1,), draft_lengths=(1, 7))
        asked = [each.body for each in server.asked[measured(server) :]]
    assert got.draft_lengths == {1: 7}
    assert {body.get("max_draft_length") for body in asked if body["max_tokens"] == 24 and len(body["messages"]) == 3} == {0, 7}
    notes = [note for note in read_journal(tmp_path / "raw.jsonl").notes if "draft_length" in note]
    assert [(note["draft_length"], sorted(note["pilot_tokens_per_s"])) for note in notes] == [(7, ["1", "7"])]


async def test_a_baseline_on_a_server_of_its_own(run: Callable[..., Any]) -> None:
    async with (
        MockOpenAi(Behaviour(owner="vllm", honours_draft_length=False)) as fast,
        MockOpenAi(Behaviour(owner="vllm", draft_length=0)) as plain,
    ):
        with pytest.raises(BadInputError, match="--baseline-url"):
            await run(fast)
        got = await run(fast, baseline_url=plain.url)
        num_plain = sum(each.question.startswith(("what", "and")) for each in plain.asked)
    assert num_plain == sum(record.arm is Arm.BASELINE for record in got.records) == len(got.records) / 2
    assert got.servers[Arm.BASELINE].base_url == plain.url
    assert acceptance_disagreements(got.records, got.runs) == ()


async def test_the_number_of_gpus_is_as_told(run: Callable[..., Any]) -> None:
    async with MockOpenAi() as server:
        got = await run(server, concurrencies=(1,), num_blocks=1, max_tokens=2, num_gpus=3)
    assert {facts.num_gpus for facts in got.servers.values()} == {3}


async def test_arms_that_answer_differently_are_told(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(is_exact=False)) as server:
        got = await run(server, concurrencies=(1,))
    (warning,) = [warning for warning in got.warnings if "answered alike" in warning]
    assert warning.startswith(f"{len(different_answers(got.records))} questions were not")


async def test_a_lying_counter_is_found_out(run: Callable[..., Any]) -> None:
    async with MockOpenAi(Behaviour(counter_factor=1.03)) as server:
        got = await run(server, concurrencies=(1,))
    assert {found.account for found in acceptance_disagreements(got.records, got.runs)} == {Account.COUNTERS}


async def test_a_server_that_counts_no_tokens_has_them_counted(run: Callable[..., Any], tmp_path: Path) -> None:
    async with MockOpenAi(Behaviour(owner="me", has_usage=False, gives_token_ids=False, gives_acceptance=False)) as server:
        got = await run(server, concurrencies=(2,), arms=(Arm.SPECULATIVE,))
    assert all(record.error is None and record.num_output_tokens == len(record.text.split()) > 0 for record in got.records)
    assert any(record.turn == 1 for record in got.records)
    assert read_journal(tmp_path / "raw.jsonl").records == got.records
    assert any("how many tokens a chunk holds" in warning for warning in got.warnings)


async def test_a_full_disk_ends_a_measurement_with_the_remedy() -> None:
    async with MockOpenAi() as server:
        with Journal(Path("/dev/full")) as journal, pytest.raises(MissingError, match="free some space"):
            await measure(replace(PLAN, base_url=server.url), journal, lambda _: None)


async def test_our_own_application(run: Callable[..., Any], tmp_path: Path) -> None:
    """Every chunk's tokens are told, drafts stop where they shall, salts reach the engine."""
    facts = replace(FACTS, max_model_len=4096)

    def engine() -> FakeEngine:
        def answer(request: Request) -> list[int]:
            made.current_stats.num_generation_tokens += request.sampling.max_tokens
            return [5 + place % 200 for place in range(request.sampling.max_tokens)]

        made = FakeEngine(facts=facts, answer=answer, chunk=3)
        return made

    folder = make_tiny_model(tmp_path / "tiny")
    with Served(engine, folder, ServerConfig(engine=EngineConfig(seed=7), port=0)) as served:
        with Journal(tmp_path / "raw.jsonl") as journal:
            got = await measure(replace(PLAN, base_url=served.url, concurrencies=(2,)), journal, lambda _: None)
        salts = {request.cache_salt for request in served.engine.requests}
        async with ChatClient(served.url) as client:
            assert (await client.get("/health"))[0] == 200
    facts_told = got.servers[Arm.BASELINE]
    assert (facts_told.kind, facts_told.dtype, facts_told.has_chunk_usage) == ("paceline", "float32", True)
    assert len(salts - {""}) == 10 + 2, "one for each run, two of probes"
    for record in got.records:
        assert record.error is None
        assert sum(record.chunk_tokens) == record.num_output_tokens == record.max_tokens
        assert record.acceptance is not None
        if record.arm is Arm.BASELINE:
            assert record.acceptance.num_spec_steps == 0
    assert {sum(record.chunk_tokens[1:2]) for record in got.records} == {3}
