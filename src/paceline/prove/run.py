"""One proof from its options to its judgement: data, measurement, certificate, statistics. The command line shows and stores what it gives.

Raw records are in a file before anything is computed from them, so that `judge_again` gives the same proof without a server.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event

import msgspec

from paceline.errors import BadInputError
from paceline.prove import utilisation
from paceline.prove.certificate.certify import certify
from paceline.prove.certificate.server import Keep
from paceline.prove.criteria import Criteria, load_criteria
from paceline.prove.datasets import subset
from paceline.prove.datasets.load import load
from paceline.prove.datasets.prompt import Dataset
from paceline.prove.environment import environment, num_cores
from paceline.prove.journal import Journal
from paceline.prove.judgement import Judgement, JudgeOptions, Objectives, Utilisation
from paceline.prove.measure import measure
from paceline.prove.options import ProveConfig, certify_options_of, num_prompts_of, objectives_of, plan_of
from paceline.prove.plan import Measurement, Plan, Progress
from paceline.prove.record import Arm, Phase
from paceline.prove.recorded import note_before, note_certificate, note_environment, note_exchange, read_recorded
from paceline.prove.results import Certificate, Criterion, Proof, Verdict
from paceline.prove.soak_process import listening_pid
from paceline.prove.verdict import judge

Tell = Callable[[str, int, int, float | None], None]
"""Stage, requests answered, requests of the stage in all, seconds left (None: not known yet)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A proof to be made. `pid`: the server's process, if it was started here."""

    config: ProveConfig
    url: str
    dataset: Dataset
    records: Path
    command: tuple[str, ...]
    pid: int | None = None
    drafting_server: Callable[[Event], AbstractContextManager[str]] | None = None
    """Starts a server that always drafts, for the certificate: one that weighs costs may draft too seldom to show a fault. It is entered
    and left in threads of their own; the event, once set, ends a start that is still under way."""

    @property
    def criteria(self) -> str | None:
        """Its thresholds: those of a server on two cores for one that was started here, else only what was asked for."""
        return self.config.criteria or (None if self.config.url is not None else "cpu")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A proof, and what it was made from."""

    proof: Proof
    measurement: Measurement
    dataset: Dataset


def dataset_of(config: ProveConfig) -> Dataset:
    """The prompts that are asked. Raises BadInputError or MissingError for data that is not there."""
    dataset = load(config.data, config.split)
    if config.category is not None:
        dataset = subset.only(dataset, [name.strip() for name in config.category.split(",")])
    num_per_category = num_prompts_of(config)
    if config.quick and num_per_category is not None:
        dataset = subset.shortest(dataset, num_per_category)  # of the minutes that a quick proof has, few go into prompts
    return dataset if num_per_category is None else subset.take(dataset, num_per_category, config.seed)


def records_path(config: ProveConfig) -> Path:
    """Where the raw records go. Raises BadInputError for a file that was named and holds some already: they would be judged as one."""
    if config.records is not None:
        if config.records.exists() and config.records.stat().st_size:
            raise BadInputError(f"--records {config.records} holds something already; name a new file, or judge it with --from-records")
        return config.records
    if config.json is not None:
        path = config.json.with_suffix(".records.jsonl")
        if path.absolute() == Path(config.replay).absolute():
            raise BadInputError(f"--replay {path} would be replaced by the raw records that belong to --json; give --json another name")
        return path
    return Path(f"prove-{datetime.now().strftime('%Y%m%d-%H%M%S')}.records.jsonl")


async def prove(job: Job, tell: Tell) -> Outcome:
    """Measure and judge. Cancelled (Ctrl-C), it returns what follows from what was measured until then.

    Raises MissingError if a server is gone before the first block, BadInputError for what cannot be measured.
    """
    config = job.config
    plan = plan_of(config, job.url, job.dataset)
    _criteria(job.criteria)  # a mistake there should not show after the measurement
    if config.records is None:
        job.records.unlink(missing_ok=True)  # as the other files of an earlier proof are replaced

    def show(progress: Progress) -> None:
        tell(progress.stage, progress.num_done, progress.num_total, progress.seconds_left)

    with Journal(job.records) as journal:
        note_before(journal, job.dataset, config.quick, job.criteria, objectives_of(config) or Objectives())
        samplers = _samplers(job, plan)
        async with AsyncExitStack() as stack:
            for sampler in {id(one): one for one in samplers.values()}.values():
                await stack.enter_async_context(sampler)
            measurement = await measure(plan, journal, show)
        certificate = None
        if (config.certify or config.quick) and measurement.is_complete:
            certificate = await _certificate(job, tell, partial(note_exchange, journal))
            if certificate is None:
                measurement = replace(measurement, warnings=(*measurement.warnings, "the certificate was stopped before its end"))
        told = environment(plan, measurement, job.command)
        told["utilisation"] = utilisation.by_concurrency(samplers, measurement.runs)
        told["utilisation_by_arm"] = utilisation.by_arm(samplers, measurement.runs)
        if certificate is not None:
            note_certificate(journal, certificate)
        note_environment(journal, told)
    return judge_again(job.records)


def judge_again(path: Path, criteria: str | None = None, objectives: Objectives | None = None) -> Outcome:
    """The proof that follows from raw records, with the thresholds and objectives of then unless others are given.

    Raises NotFoundError or BadInputError for a file that is none.
    """
    recorded = read_recorded(path)
    measurement, told = recorded.measurement, dict(recorded.environment)
    found = told.pop("utilisation_by_arm", None)
    objectives = objectives or recorded.objectives
    told["goodput_objectives"] = f"{objectives} ms"
    options = JudgeOptions(recorded.dataset.prompts, recorded.is_quick, objectives, _utilisation(found))
    judgement = _judged(measurement, criteria or recorded.criteria, options)
    return Outcome(_proof(judgement, measurement, recorded.certificate, told), measurement, recorded.dataset)


def _criteria(name: str | None) -> Criteria | None:
    return None if name is None else load_criteria(name)


def _samplers(job: Job, plan: Plan) -> dict[Arm, utilisation.Sampler]:
    """One per server on this machine whose processes can be seen; both arms share it where they share the server."""
    urls = {Arm.SPECULATIVE: plan.base_url, Arm.BASELINE: plan.baseline_url or plan.base_url}
    samplers: dict[str, utilisation.Sampler] = {}
    for url in dict.fromkeys(urls.values()):
        pid = job.pid if job.pid is not None and url == job.url else listening_pid(url)
        if pid is not None:
            samplers[url] = utilisation.Sampler(partial(utilisation.cpu_seconds, pid), num_cores())
    return {arm: samplers[url] for arm, url in urls.items() if url in samplers}


@asynccontextmanager
async def _certified_url(job: Job) -> AsyncGenerator[str]:
    """The server that the certificate is of. Its start takes long and blocks, so it is in a thread, that Ctrl-C gets through meanwhile."""
    if job.drafting_server is None:
        yield job.url
        return
    is_stopped = Event()
    server = job.drafting_server(is_stopped)
    starting = asyncio.ensure_future(asyncio.to_thread(server.__enter__))
    try:
        url = await asyncio.shield(starting)
    except asyncio.CancelledError:
        is_stopped.set()
        await asyncio.wait([starting])
        if starting.exception() is None:  # it was ready just then
            await asyncio.to_thread(server.__exit__, None, None, None)
        raise
    try:
        yield url
    except BaseException as error:
        await asyncio.to_thread(server.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(server.__exit__, None, None, None)


async def _certificate(job: Job, tell: Tell, keep: Keep) -> Certificate | None:
    """None if it was cancelled before its end."""

    def show(stage: str, num_done: int, num_total: int) -> None:
        tell(f"certificate, {stage}", num_done, num_total, None)

    try:
        async with _certified_url(job) as url:
            return await certify(url, job.dataset.prompts, certify_options_of(job.config), show, keep)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return None


def _utilisation(found: object) -> dict[Arm, Utilisation]:
    return {} if found is None else msgspec.convert(found, dict[Arm, Utilisation])


def _judged(measurement: Measurement, criteria: str | None, options: JudgeOptions) -> Judgement:
    """The judgement; of a measurement that was stopped early never more than INCONCLUSIVE."""
    num_runs = {arm: sum(run.arm == arm and run.phase == Phase.MEASURE for run in measurement.runs) for arm in Arm}
    stopped = f"stopped before its end, after {num_runs[Arm.BASELINE]} plain and {num_runs[Arm.SPECULATIVE]} accelerated blocks"
    if not all(num_runs.values()):
        ended = "ended without a block in both arms" if measurement.is_complete else f"was {stopped}"
        return Judgement(Verdict.INCONCLUSIVE, (f"the measurement {ended}: there is nothing to compare",), (), (), (), ())
    judgement = judge(measurement, _criteria(criteria), options)
    if measurement.is_complete:
        return judgement
    verdict = judgement.verdict if judgement.verdict == Verdict.INVALID else Verdict.INCONCLUSIVE
    return replace(judgement, verdict=verdict, reasons=(f"the measurement was {stopped}", *judgement.reasons))


def _proof(judgement: Judgement, measurement: Measurement, certificate: Certificate | None, told: dict[str, object]) -> Proof:
    """Judgement and certificate together: output that changes is a broken promise, whatever the speed."""
    verdict, reasons, criteria = judgement.verdict, judgement.reasons, judgement.criteria
    if certificate is not None:
        criteria = (*criteria, Criterion("output is that of plain decoding", "kept", None, certificate.holds))
        if certificate.broken and verdict in (Verdict.PASS, Verdict.INCONCLUSIVE):
            verdict, reasons = Verdict.FAIL, (f"the certificate is broken: {certificate.broken[0]}", *reasons)
    return Proof(verdict, reasons, told, criteria, judgement.arms, judgement.speedup, certificate, judgement.pareto)
