"""One proof from end to end against a server without a model; and judging its raw records again."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import BadInputError, MissingError
from paceline.prove import run as run_module
from paceline.prove.certificate.server import Exchange
from paceline.prove.judgement import JudgeOptions, Objectives
from paceline.prove.options import ProveConfig
from paceline.prove.record import Arm, Phase
from paceline.prove.report.document import as_document
from paceline.prove.results import Certificate, Verdict
from paceline.prove.run import Job, Outcome, dataset_of, judge_again, prove, records_path
from tests.fakes.made_proof import made_proof
from tests.fakes.made_records import made_dataset, made_measurement
from tests.fakes.mock_openai import Behaviour, MockOpenAi

CONFIG = ProveConfig(category="qa,coding,math", num_prompts=4, concurrency="2", num_blocks=4, max_tokens=16)


def job(url: str, records: Path, config: ProveConfig = CONFIG) -> Job:
    config = replace(config, url=url)
    return Job(config, url, dataset_of(config), records, ("paceline", "prove", "--api-key", "s3cret"))


def silent(stage: str, num_done: int, num_total: int, seconds_left: float | None) -> None:
    pass


def dropped(exchange: Exchange) -> None:
    pass


async def proved(records: Path, behaviour: Behaviour, config: ProveConfig = CONFIG) -> Outcome:
    async with MockOpenAi(behaviour) as server:
        return await prove(job(server.url, records, config), silent)


@pytest.fixture(autouse=True)
def no_wait_for_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.prove.counters._POLL_S", 0.001)


async def test_a_whole_proof_and_the_same_again_from_its_records(tmp_path: Path) -> None:
    records = tmp_path / "prove.records.jsonl"
    outcome = await proved(records, Behaviour(step_s=0.004))
    proof = outcome.proof
    assert proof.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), proof.reasons
    (overall,) = [cell for cell in proof.speedup if cell.category == "overall"]
    assert overall.ratio > 1.2, "a step costs the same, and drafts make it worth more"
    assert {arm.category for arm in proof.arms} == {"overall", "qa", "coding", "math"}
    assert "s3cret" not in str(proof.environment)
    assert "not SPEED-Bench" in str(proof.environment["dataset"])
    assert as_document(judge_again(records).proof) == as_document(proof)
    assert proof.criteria == ()
    assert len(judge_again(records, "source").proof.criteria) >= 5


async def test_goodput_is_held_against_the_objectives_that_were_given(tmp_path: Path) -> None:
    records = tmp_path / "a.records.jsonl"
    config = replace(CONFIG, category="qa", goodput="ttft:60000,e2e:0.001")
    proof = (await proved(records, Behaviour(), config)).proof
    assert proof.environment["goodput_objectives"] == "ttft:60000,e2e:0.001 ms"
    assert {arm.goodput for arm in proof.arms} == {0.0}
    assert as_document(judge_again(records).proof) == as_document(proof)
    again = judge_again(records, objectives=Objectives(60_000, None, None)).proof
    assert again.environment["goodput_objectives"] == "ttft:60000 ms"
    assert {arm.goodput for arm in again.arms} == {1.0}


@pytest.mark.parametrize(("percent", "passed"), [(95.0, True), (30.0, False), (None, None)])
async def test_a_gpu_that_the_server_publishes_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: float | None, passed: bool | None
) -> None:
    monkeypatch.setattr("paceline.prove.counters._WATCH_INTERVAL_S", 0.002)
    behaviour = Behaviour(step_s=0.001, gpu_percents=None if percent is None else (percent, percent), bandwidth_fraction=0.25)
    records = tmp_path / "a.records.jsonl"
    proof = (await proved(records, behaviour, replace(CONFIG, category="qa", criteria="source"))).proof
    (criterion,) = [one for one in proof.criteria if one.name == "GPU utilisation"]
    assert (criterion.value, criterion.passed) == (percent, passed)
    if percent is not None:
        assert "gpu_utilization_percent of the server's /metrics; memory bandwidth used: 25%" in criterion.threshold
    assert as_document(judge_again(records).proof) == as_document(proof)


async def test_stopped_early_it_keeps_what_it_has_and_is_inconclusive(tmp_path: Path) -> None:
    records = tmp_path / "prove.records.jsonl"
    num_asked = 0

    def stop_late(stage: str, num_done: int, num_total: int, seconds_left: float | None) -> None:
        nonlocal num_asked
        num_asked = num_done
        if num_done >= num_total - 4:
            task.cancel()

    async with MockOpenAi(Behaviour(step_s=0.001)) as server:
        task = asyncio.create_task(prove(job(server.url, records), stop_late))
        outcome = await task
    assert outcome.proof.verdict == Verdict.INCONCLUSIVE
    assert "stopped before its end" in outcome.proof.reasons[0]
    assert outcome.proof.speedup, "whole blocks are judged all the same"
    kept = [record for record in outcome.measurement.records if record.phase == Phase.MEASURE]
    assert len(kept) >= num_asked - 4
    assert judge_again(records).proof.verdict == Verdict.INCONCLUSIVE


async def test_stopped_at_once_there_is_a_report_that_says_so(tmp_path: Path) -> None:
    def stop(stage: str, num_done: int, num_total: int, seconds_left: float | None) -> None:
        task.cancel()

    async with MockOpenAi() as server:
        task = asyncio.create_task(prove(job(server.url, tmp_path / "a.records.jsonl"), stop))
        proof = (await task).proof
    assert (proof.verdict, proof.arms, proof.speedup) == (Verdict.INCONCLUSIVE, (), ())
    assert "nothing to compare" in proof.reasons[0]


def test_where_nothing_could_be_recorded_there_is_nothing_to_compare() -> None:
    measurement = replace(made_measurement(made_dataset()), records=(), runs=())
    found = [run_module._judged(replace(measurement, is_complete=is_complete), None, JudgeOptions(())) for is_complete in (True, False)]
    assert {one.verdict for one in found} == {Verdict.INCONCLUSIVE}
    assert ["stopped" in one.reasons[0] for one in found] == [False, True]


async def test_a_drafter_that_never_gains_fails_or_stays_open_but_never_passes(tmp_path: Path) -> None:
    proof = (await proved(tmp_path / "a.records.jsonl", Behaviour(draft_length=0, honours_draft_length=True))).proof
    assert proof.verdict != Verdict.PASS


async def test_a_server_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        await prove(job("http://127.0.0.1:9", tmp_path / "a.records.jsonl"), silent)


async def test_a_fault_in_the_criteria_shows_before_anything_is_measured(tmp_path: Path) -> None:
    async with MockOpenAi() as server:
        with pytest.raises(BadInputError):
            await prove(job(server.url, tmp_path / "a", replace(CONFIG, criteria="no/such/file.yaml")), silent)
        assert server.asked == []


def judgement_of(verdict: Verdict) -> run_module.Judgement:
    return run_module.Judgement(verdict, ("because",), (), (), (), ())


@pytest.mark.parametrize(
    ("verdict", "broken", "combined"),
    [
        (Verdict.PASS, (), Verdict.PASS),
        (Verdict.PASS, ("top_k",), Verdict.FAIL),
        (Verdict.INCONCLUSIVE, ("top_k",), Verdict.FAIL),
        (Verdict.FAIL, ("top_k",), Verdict.FAIL),
        (Verdict.INVALID, ("top_k",), Verdict.INVALID),
    ],
)
def test_speed_does_not_buy_other_output(verdict: Verdict, broken: tuple[str, ...], combined: Verdict) -> None:
    certificate = Certificate(True, True, 10, (), (), broken=broken)
    measurement = run_module.Measurement((), (), {}, {}, (), 0.0, True)
    proof = run_module._proof(judgement_of(verdict), measurement, certificate, {})
    assert proof.verdict == combined
    assert proof.criteria[-1].passed is not bool(broken)
    assert "because" in proof.reasons


def test_raw_records_are_never_mixed(tmp_path: Path) -> None:
    named = tmp_path / "mine.jsonl"
    assert records_path(ProveConfig(records=named)) == named
    named.write_text("something\n")
    with pytest.raises(BadInputError, match="--from-records"):
        records_path(ProveConfig(records=named))
    assert records_path(ProveConfig(json=tmp_path / "out.json")) == tmp_path / "out.records.jsonl"
    assert records_path(ProveConfig()).name.endswith(".records.jsonl")


def test_only_a_server_started_here_is_held_to_the_thresholds_of_two_cores() -> None:
    dataset = dataset_of(CONFIG)
    made = {config.url: Job(config, "u", dataset, Path("x"), ()).criteria for config in (CONFIG, replace(CONFIG, url="u"))}
    assert made == {None: "cpu", "u": None}
    assert Job(replace(CONFIG, url="u", criteria="source"), "u", dataset, Path("x"), ()).criteria == "source"


def test_a_subset_is_named_in_the_label() -> None:
    dataset = dataset_of(CONFIG)
    assert "4 requests per category" in dataset.label
    assert {prompt.category for prompt in dataset.prompts} == {"qa", "coding", "math"}


async def test_one_sampler_for_a_server_that_both_arms_share() -> None:
    async with MockOpenAi() as server:
        one = job(server.url, Path("x"))
        samplers = run_module._samplers(one, run_module.plan_of(one.config, one.url, one.dataset))
        assert samplers[Arm.BASELINE] is samplers[Arm.SPECULATIVE]
        assert samplers[Arm.BASELINE].read() or 0 > 0
        far = job("http://gpu.example:8000", Path("x"))
        assert run_module._samplers(far, run_module.plan_of(far.config, far.url, far.dataset)) == {}


class Start:
    """A server whose start lasts until it is told to stop, or `is_ready`."""

    def __init__(self, url: str, is_ready: bool) -> None:
        self.url, self.is_ready, self.events = url, is_ready, list[str]()

    @contextmanager
    def __call__(self, is_stopped: threading.Event) -> Generator[str]:
        self.events.append("start")
        if not self.is_ready and is_stopped.wait(20.0):
            self.events.append("stopped")
            raise MissingError("stopped")
        try:
            yield self.url
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        finally:
            self.events.append("end")


async def test_a_proof_can_be_stopped_while_the_certificates_server_starts() -> None:
    start = Start("http://127.0.0.1:9", is_ready=False)
    certifying = asyncio.create_task(run_module._certificate(replace(job("u", Path("x")), drafting_server=start), silent, dropped))
    while not start.events:  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.001)
    certifying.cancel()
    assert await asyncio.wait_for(certifying, 10.0) is None
    assert start.events == ["start", "stopped"]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_the_certificates_server_is_ended_in_any_case(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    certificate = made_proof().certificate
    asked: list[str] = []

    async def certify(url: str, *_: object) -> Certificate | None:
        asked.append(url)
        if is_cancelled:
            raise asyncio.CancelledError
        return certificate

    monkeypatch.setattr(run_module, "certify", certify)
    start = Start("http://127.0.0.1:9", is_ready=True)
    found = await run_module._certificate(replace(job("u", Path("x")), drafting_server=start), silent, dropped)
    assert asked == ["http://127.0.0.1:9"]
    assert found == (None if is_cancelled else certificate)
    assert start.events == ["start", *(["cancelled"] if is_cancelled else []), "end"]


def test_the_certificate_stands_in_the_proof() -> None:
    certificate = made_proof().certificate
    measurement = run_module.Measurement((), (), {}, {}, (), 0.0, True)
    assert run_module._proof(judgement_of(Verdict.PASS), measurement, certificate, {}).certificate == certificate
