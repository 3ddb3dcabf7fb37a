"""Carries out a plan: examines the servers, runs the schedule one run at a time, and keeps every answer. `measure` is the entry point.

    measurement = await measure(plan, journal, show_progress)

No statistics here. Nothing that a server does ends a measurement early, except that it is gone before the first run.
"""

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from paceline.errors import BadInputError
from paceline.prove.agreement import different_answers
from paceline.prove.client import NO_USAGE, Answer, Ask, ChatClient, Message
from paceline.prove.counters import Meter, Watch
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.journal import Journal
from paceline.prove.load import LagMeter, closed_loop, open_loop
from paceline.prove.plan import Measurement, Plan, Progress, ServerFacts
from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord
from paceline.prove.schedule import Run, schedule
from paceline.prove.server import examine, request_fields
from paceline.prove.tokens import TokenCounter

MAX_LAG_MS = 5.0  # of the measuring process at the 99th percentile; beyond it the times are its own as well
_DRAIN_S = 30.0
_SEED_BITS = 31  # what every server takes


@dataclass(slots=True)
class _Side:
    """One arm's server."""

    client: ChatClient
    meter: Meter
    facts: ServerFacts
    tokens: TokenCounter | None = None  # for a server that does not count


async def measure(plan: Plan, journal: Journal, progress: Callable[[Progress], None]) -> Measurement:
    """Measure everything that `plan` asks for. `progress` is called after each answer.

    Cancelled while it measures (Ctrl-C), it returns what it has, marked as incomplete. Raises MissingError if a server cannot be
    reached, BadInputError for one that cannot be compared in this way or a plan that does not fit its data.
    """
    runs = schedule(plan)
    api_key = plan.api_key or os.environ.get("PACELINE_API_KEY")
    async with AsyncExitStack() as stack:

        async def side(url: str) -> _Side:
            client = await stack.enter_async_context(ChatClient(url, api_key, plan.timeout_s))
            meter = Meter(client)
            facts = await examine(client, meter, plan.model, probes_eos=plan.ignore_eos)
            return _Side(client, meter, facts, None if facts.has_stream_usage else await TokenCounter.find(client, facts.model))

        speculative = await side(plan.base_url)
        baseline = speculative if plan.baseline_url is None else await side(plan.baseline_url)
        sides = {Arm.BASELINE: baseline, Arm.SPECULATIVE: speculative}
        _check_comparable(plan, sides)
        work = _Work(plan, {arm: sides[arm] for arm in plan.arms}, journal, progress, runs)
        journal.add_note(plan=_told(plan), servers={arm: sides[arm].facts for arm in plan.arms}, time_s=time.time())
        return await work.do()


def _check_comparable(plan: Plan, sides: dict[Arm, _Side]) -> None:
    if len(plan.arms) < 2 or plan.baseline_url is not None:
        return
    facts = sides[Arm.BASELINE].facts
    if facts.honours_draft_length or (facts.honours_draft_length is None and facts.kind == "paceline"):
        return
    raise BadInputError(
        f"{facts.base_url} does not show that it can decode without drafts when a request asks for it (max_draft_length: 0); "
        "start a second server without a drafter and give its URL as --baseline-url"
    )


def _of_shared_cache(plan: Plan, sides: dict[Arm, _Side]) -> list[str]:
    """A warning where both arms ask one server and nothing shows that its cache keeps their prompts apart."""
    if plan.baseline_url is not None or len(sides) < 2:
        return []
    facts = sides[Arm.BASELINE].facts
    if facts.separates_salts:
        return []
    seen = "does not keep" if facts.separates_salts is False else "does not show whether it keeps"
    return [
        f"{facts.base_url} {seen} requests with another cache_salt apart in its prefix cache, and both arms ask it: the arm that comes "
        "second may find the first one's prompts there; start the server without prefix caching, or look at the cached tokens"
    ]


def _told(plan: Plan) -> dict[str, object]:
    """The plan as a journal keeps it: without the key, and of the data set the hash."""
    return {
        "base_url": plan.base_url,
        "baseline_url": plan.baseline_url,
        "model": plan.model,
        "dataset": plan.dataset.label,
        "split": plan.dataset.split,
        "dataset_sha256": plan.dataset.sha256,
        "num_prompts": len(plan.dataset.prompts),
        "concurrencies": plan.concurrencies,
        "rates_per_s": plan.rates_per_s,
        "num_blocks": plan.num_blocks,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "draft_lengths": plan.draft_lengths,
        "arms": plan.arms,
        "timeout_s": plan.timeout_s,
        "ignore_eos": plan.ignore_eos,
        "warm_up_tokens": plan.warm_up_tokens,
    }


class _Work:
    """A schedule being carried out."""

    def __init__(
        self, plan: Plan, sides: dict[Arm, _Side], journal: Journal, progress: Callable[[Progress], None], runs: Sequence[Run]
    ) -> None:
        self._plan = plan
        self._sides = sides
        self._journal = journal
        self._tell = progress
        self._runs = runs
        self._nonce = uuid.uuid4().hex  # in every salt: an earlier measurement has filled the same server's caches
        self._records: list[RequestRecord] = []
        self._of_run: list[RequestRecord] = []  # of the run in flight
        self._block_runs: list[BlockRun] = []
        lengths = plan.draft_lengths
        self._draft_lengths = {run.point.concurrency: lengths[0] if len(lengths) == 1 else None for run in runs}
        self._pilots: dict[int, list[float]] = {}  # draft length -> tokens and seconds, of this point
        self._warnings: Counter[str] = Counter(_of_shared_cache(plan, sides))
        self._lag = LagMeter()
        self._start_s = time.monotonic()
        self._num_done = 0
        self._num_total = sum(run.num_requests for run in runs)
        self._tokens_done = 0  # those asked for, as a measure of the work behind and ahead
        self._tokens_total = sum(run.num_requests * run.max_tokens for run in runs)

    async def do(self) -> Measurement:
        is_complete = False
        async with self._lag:
            try:
                for run in self._runs:
                    await self._run(run)
                is_complete = True
            except asyncio.CancelledError:
                await self._keep()
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
        if self._lag.p99_ms > MAX_LAG_MS:
            self._warnings[
                f"the measuring process was up to {self._lag.p99_ms:.1f} ms late (99th percentile): its own work is part of the times"
            ] += 1
        if different := different_answers(self._records):
            first = different[0]
            self._warnings[
                f"{len(different):,} questions were not answered alike in both arms (such as {first.question_id}, turn {first.turn + 1}, "
                f"from character {first.num_same_chars} on): times are compared per token"
            ] += 1
        warnings = tuple(text if number == 1 else f"{text} ({number:,} times)" for text, number in self._warnings.items())
        self._journal.add_note(warnings=warnings, is_complete=is_complete, loop_lag_p99_ms=self._lag.p99_ms)
        return Measurement(
            records=tuple(self._records),
            runs=tuple(self._block_runs),
            servers={arm: side.facts for arm, side in self._sides.items()},
            draft_lengths=self._draft_lengths,
            warnings=warnings,
            loop_lag_p99_ms=self._lag.p99_ms,
            is_complete=is_complete,
        )

    async def _run(self, run: Run) -> None:
        side, num_done = self._sides[run.arm], self._num_done
        if self._pilots and run.phase is Phase.MEASURE:
            self._choose_draft_length(run)
        self._of_run = []
        for meter in dict.fromkeys(side.meter for side in self._sides.values()):
            if (await meter.idle(_DRAIN_S)).num_busy:
                self._warnings["a server was busy with requests of others when a block began"] += 1
        before = await side.meter.read()

        async def send(prompt: Prompt, turn: int, messages: Sequence[Message]) -> Answer:
            answer = await side.client.complete(self._ask(run, side.facts, prompt, turn, messages))
            record = _record(run, prompt, turn, answer)
            self._note_answer(answer)
            self._of_run.append(record)
            if side.facts.has_stream_usage:
                self._journal.add_request(record)
            self._advance(run, 1)
            return replace(answer, error=None) if self._is_uncounted(record) else answer

        try:
            async with Watch(side.meter, before) as watch:
                if run.point.concurrency:
                    await closed_loop(run.prompts, run.point.concurrency, send)
                else:
                    await open_loop(run.prompts, run.point.rate_per_s, f"{self._plan.seed} {run.point} {run.block}", send)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        records = await self._keep()
        self._advance(run, run.num_requests - (self._num_done - num_done))  # turns that were not asked behind a failed one
        after = await side.meter.settled(before, sum(record.num_output_tokens for record in records))
        block_run = BlockRun(
            arm=run.arm,
            phase=run.phase,
            concurrency=run.point.concurrency,
            block=run.block,
            place=run.place,
            start_s=min(record.sent_s for record in records),
            end_s=max(record.end_s for record in records),
            counters_before=before.counters,
            counters_after=after.counters,
            gauges=watch.gauges(after),
            rate_per_s=run.point.rate_per_s,
        )
        self._journal.add_run(block_run)
        self._block_runs.append(block_run)
        if run.pilot_length is not None:
            pilot = self._pilots.setdefault(run.pilot_length, [0.0, 0.0])
            pilot[0] += sum(record.num_output_tokens for record in records)
            pilot[1] += block_run.end_s - block_run.start_s

    async def _keep(self) -> list[RequestRecord]:
        """Keep what the run in flight has; first, off the clock, count the tokens of answers that came without usage."""
        kept: list[RequestRecord] = []
        while self._of_run:
            record = self._of_run[0]
            side = self._sides[record.arm]
            if side.tokens is not None and self._is_uncounted(record):
                num_tokens = await side.tokens.count(record.text)
                record = record if num_tokens is None else replace(record, num_output_tokens=num_tokens, error=None)
            if not side.facts.has_stream_usage:
                self._journal.add_request(record)
            self._of_run.pop(0)
            self._records.append(record)
            kept.append(record)
        return kept

    def _choose_draft_length(self, run: Run) -> None:
        """Before the first block of a point: the length that gave most tokens per second when they were tried out here."""
        rates = {length: tokens / max(seconds, 1e-9) for length, (tokens, seconds) in self._pilots.items()}
        chosen = max(rates, key=lambda length: rates[length])
        self._draft_lengths[run.point.concurrency] = chosen
        self._journal.add_note(point=str(run.point), draft_length=chosen, pilot_tokens_per_s=rates)
        self._pilots = {}

    def _is_uncounted(self, record: RequestRecord) -> bool:
        """An answer that is whole but for its usage, of a server that never gives any."""
        return record.error == NO_USAGE and not self._sides[record.arm].facts.has_stream_usage

    def _ask(self, run: Run, facts: ServerFacts, prompt: Prompt, turn: int, messages: Sequence[Message]) -> Ask:
        wanted: dict[str, object] = {"cache_salt": f"{self._nonce}-{run.place}"}
        if run.arm is Arm.BASELINE:
            wanted["max_draft_length"] = 0
        else:
            length = run.pilot_length or self._draft_lengths.get(run.point.concurrency)
            if length is not None:
                wanted["max_draft_length"] = length
        if self._plan.ignore_eos:
            wanted["ignore_eos"] = True
        if self._plan.wants_token_ids:
            wanted["return_token_ids"] = True
        fields, stream_options = request_fields(facts, wanted)
        seed = None
        if self._plan.temperature > 0:  # the same in both arms
            seed = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._plan.seed} {run.block} {prompt.question_id} {turn}").int % (1 << _SEED_BITS)
        return Ask(facts.model, messages, run.max_tokens, self._plan.temperature, seed, fields, stream_options)

    def _note_answer(self, answer: Answer) -> None:
        if answer.acceptance_fault is not None:
            self._warnings[f"{answer.acceptance_fault}; the account of that request is not used"] += 1
        if answer.error in (None, NO_USAGE) and not answer.chunk_tokens:
            self._warnings["the server does not say how many tokens a chunk holds, or its counts do not add up"] += 1

    def _advance(self, run: Run, num_requests: int) -> None:
        if not num_requests:
            return
        self._num_done += num_requests
        self._tokens_done += num_requests * run.max_tokens
        seconds = (time.monotonic() - self._start_s) * (self._tokens_total - self._tokens_done) / max(self._tokens_done, 1)
        self._tell(Progress(str(run), self._num_done, self._num_total, seconds))


def _record(run: Run, prompt: Prompt, turn: int, answer: Answer) -> RequestRecord:
    return RequestRecord(
        arm=run.arm,
        phase=run.phase,
        concurrency=run.point.concurrency,
        block=run.block,
        place=run.place,
        question_id=prompt.question_id,
        category=prompt.category,
        turn=turn,
        sent_s=answer.sent_s,
        chunk_times_s=answer.chunk_times_s,
        chunk_tokens=answer.chunk_tokens,
        end_s=answer.end_s,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_output_tokens=answer.num_output_tokens,
        finish_reason=answer.finish_reason,
        status=answer.status,
        error=answer.error,
        text=answer.text,
        token_ids=answer.token_ids,
        max_tokens=run.max_tokens,
        rate_per_s=run.point.rate_per_s,
        acceptance=answer.acceptance,
    )
