"""The options of a proof: their defaults, and what contradicts itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import BadInputError
from paceline.prove.journal import Journal
from paceline.prove.judgement import Objectives
from paceline.prove.options import ProveConfig, certify_options_of, check, num_prompts_of, objectives_of, plan_of, whole_numbers
from paceline.prove.plan import ReplayMode
from paceline.prove.record import RecordedConversation, RecordedTurn
from paceline.prove.run import records_path
from tests.fakes.made_records import made_dataset

DATASET = made_dataset()
URL = "http://127.0.0.1:1"


def test_the_quick_proof_is_small_and_the_full_one_is_not() -> None:
    quick, full = (plan_of(ProveConfig(quick=is_quick), URL, DATASET) for is_quick in (True, False))
    assert (quick.concurrencies, quick.max_tokens, num_prompts_of(ProveConfig(quick=True))) == ((1, 4), 96, 4)
    assert (full.concurrencies, full.max_tokens, num_prompts_of(ProveConfig())) == ((1, 4, 16), 256, None)


def test_the_quick_certificate_is_small_unless_it_is_asked_for_by_name() -> None:
    quick, named, full = (
        certify_options_of(config) for config in (ProveConfig(quick=True), ProveConfig(quick=True, certify=True), ProveConfig())
    )
    assert named == full
    assert (quick.num_prompts, quick.max_tokens, quick.num_samples) == (6, 32, 60)
    assert quick.num_samples < full.num_samples
    assert (quick.alpha, quick.epsilon) == (full.alpha, full.epsilon), "smaller, not laxer"


def test_what_is_given_wins_over_the_quick_proofs_own() -> None:
    config = ProveConfig(quick=True, concurrency="2, 8,2", max_tokens=7, num_prompts=3, draft_lengths="1,3", rate="0.5, 2", seed=9)
    plan = plan_of(config, URL, DATASET)
    assert (plan.concurrencies, plan.max_tokens, plan.draft_lengths, plan.rates_per_s, plan.seed) == ((2, 8), 7, (1, 3), (0.5, 2.0), 9)
    assert num_prompts_of(config) == 3


def test_a_model_names_one_of_the_servers_or_the_one_to_start() -> None:
    assert plan_of(ProveConfig(url=URL, model="m"), URL, DATASET).model == "m"
    assert plan_of(ProveConfig(model="some/folder"), URL, DATASET).model is None
    assert certify_options_of(ProveConfig(model="some/folder")).model is None


@pytest.mark.parametrize("text", ["", "1,", "a", "1.5", "-1", "1e3", "\u0663", "9" * 10, ",".join(["1"] * 65)])
def test_lists_of_numbers_are_checked(text: str) -> None:
    with pytest.raises(BadInputError, match="--concurrency"):
        whole_numbers("concurrency", text)


@pytest.mark.parametrize(
    ("text", "objectives"),
    [
        (None, None),
        ("ttft:500,tpot:100,e2e:5000", Objectives(500, 100, 5000)),
        ("tpot:50", Objectives(None, 50, None)),
        ("ttft:500 tpot:50.5 e2el:9e3", Objectives(500, 50.5, 9000)),
    ],
)
def test_objectives_are_those_that_are_named(text: str | None, objectives: Objectives | None) -> None:
    config = ProveConfig(goodput=text)
    assert objectives_of(config) == objectives
    if objectives is not None:
        assert objectives_of(ProveConfig(goodput=str(objectives))) == objectives
    check(config)


@pytest.mark.parametrize(
    "text", ["", " ,", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "e2e:1,e2el:2"]
)
def test_other_objectives_are_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(BadInputError, match=r"--goodput.*ttft:500,tpot:50,e2e:5000"):
        check(ProveConfig(goodput=text))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ProveConfig(from_records=Path("x"), url=URL, quick=True), "--url, --quick has no effect"),
        (ProveConfig(url=URL, draft="ngram"), "--draft"),
        (ProveConfig(baseline_url=URL), "--baseline-url"),
        (ProveConfig(soak="3m", html=Path("x.html")), "--soak"),
        (ProveConfig(json=Path("/no/such/folder/x.json")), "create it"),
        (ProveConfig(html=Path("/")), "is a folder"),
    ],
)
def test_contradictions_are_told_before_anything_starts(config: ProveConfig, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        check(config)


def test_sound_options_pass() -> None:
    check(ProveConfig())
    check(ProveConfig(url=URL, baseline_url=URL, quick=True, json=Path("x.json")))
    check(ProveConfig(from_records=Path("x"), criteria="source", html=Path("x.html")))


@pytest.mark.parametrize("change", [{"max_tokens": -1}, {"temperature": -1.0}, {"num_blocks": 0}, {"timeout": 0.0}, {"rate": "1e5"}])
def test_values_out_of_range_are_refused(change: dict) -> None:
    with pytest.raises(BadInputError):
        plan_of(replace(ProveConfig(), **change), URL, DATASET)


@pytest.mark.parametrize("text", ["", "1,", "a", "0", "-1", "inf", "nan", ",".join(["1"] * 65)])
def test_arrival_rates_are_checked_before_anything_starts(text: str) -> None:
    with pytest.raises(BadInputError, match="--rate"):
        check(ProveConfig(url=URL, rate=text))


def test_what_is_replayed_is_a_mode_or_a_file(tmp_path: Path) -> None:
    assert plan_of(ProveConfig(replay="off"), URL, DATASET).replay is ReplayMode.OFF
    with pytest.raises(BadInputError, match="none of auto, on, off, and no file"):
        check(ProveConfig(url=URL, replay="maybe"))
    file = tmp_path / "a.records.jsonl"
    with Journal(file) as journal:
        journal.add_note(plan={"dataset_sha256": DATASET.sha256})
        for prompt in DATASET.prompts:
            journal.add_note(recording=RecordedConversation(prompt.question_id, (RecordedTurn("well", 7),) * len(prompt.turns)))
    check(ProveConfig(url=URL, replay=str(file)))
    plan = plan_of(ProveConfig(replay=str(file)), URL, DATASET)
    assert plan.replay is ReplayMode.ON
    assert [one.question_id for one in plan.recording] == [prompt.question_id for prompt in DATASET.prompts]
    with pytest.raises(BadInputError, match="would be replaced"):
        records_path(ProveConfig(json=tmp_path / "a.json", replay=str(file)))


def test_the_number_of_gpus_can_be_told() -> None:
    assert plan_of(ProveConfig(gpus=4), URL, DATASET).num_gpus == 4
    assert plan_of(ProveConfig(), URL, DATASET).num_gpus is None
    with pytest.raises(BadInputError, match="gpus is 0"):
        plan_of(ProveConfig(gpus=0), URL, DATASET)
