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
from dataclasses import replace
from functools import partial
from itertools import groupby

from paceline.errors import BadInputError
from paceline.prove.agreement import different_answers
from paceline.prove.client import NO_USAGE, Answer, Ask, ChatClient, Message
from paceline.prove.counters import Meter, Watch
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.journal import Journal
from paceline.prove.load import LagMeter, closed_loop, open_loop
from paceline.prove.plan import Measurement, Plan, Progress, ReplayMode, ServerFacts
from paceline.prove.record import Arm, BlockRun, Phase, RecordedConversation, RequestRecord
from paceline.prove.replay import Replay, has_equal_work, num_lost, played, reason_to_replay, recording_of
from paceline.prove.schedule import Point, Run, schedule
from paceline.prove.server import examine, gives_length, length_fields, request_fields
from paceline.prove.sides import Side, check_comparable, of_shared_cache, told, uncertain_caches
from paceline.prove.tokens import TokenCounter

MAX_LAG_MS = 5.0  # of the measuring process at the 99th percentile; beyond it the times are its own as well
_DRAIN_S = 30.0
_SEED_BITS = 31  # what every server takes


async def measure(plan: Plan, journal: Journal, progress: Callable[[Progress], None]) -> Measurement:
    """Measure everything that `plan` asks for. `progress` is called after each answer.

    Cancelled while it measures (Ctrl-C), it returns what it has, marked as incomplete. Raises MissingError if a server cannot be
    reached, BadInputError for one that cannot be compared in this way or a plan that does not fit its data.
    """
    runs = schedule(plan)
    api_key = plan.api_key or os.environ.get("PACELINE_API_KEY")
    async with AsyncExitStack() as stack:

        async def side(url: str) -> Side:
            client = await stack.enter_async_context(ChatClient(url, api_key, plan.timeout_s))
            meter = Meter(client)
            facts = await examine(client, meter, plan.model, probes_eos=plan.ignore_eos)
            facts = replace(facts, num_gpus=facts.num_gpus or plan.num_gpus)
            return Side(client, meter, facts, None if facts.has_stream_usage else await TokenCounter.find(client, facts.model))

        speculative = await side(plan.base_url)
        baseline = speculative if plan.baseline_url is None else await side(plan.baseline_url)
        sides = {Arm.BASELINE: baseline, Arm.SPECULATIVE: speculative}
        check_comparable(plan, sides)
        work = _Work(plan, {arm: sides[arm] for arm in plan.arms}, journal, progress, runs)
        journal.add_note(plan=told(plan), servers={arm: sides[arm].facts for arm in plan.arms}, time_s=time.time())
        return await work.do()


class _Work:
    """A schedule being carried out."""

    def __init__(
        self, plan: Plan, sides: dict[Arm, Side], journal: Journal, progress: Callable[[Progress], None], runs: Sequence[Run]
    ) -> None:
        self._plan = plan
        self._sides = sides
        self._journal = journal
        self._tell = progress
        self._runs = runs
        self._num_runs = 0  # begun so far: the next one's place
        self._replay = Replay()
        self._contents: dict[tuple[str, int], str] = {}  # of a recording pass: what later turns see, by question and turn
        self._before: list[RequestRecord] = []  # of the run before this one
        self._nonce = uuid.uuid4().hex  # in every salt: an earlier measurement has filled the same server's caches
        self._records: list[RequestRecord] = []
        self._of_run: list[RequestRecord] = []  # of the run in flight
        self._block_runs: list[BlockRun] = []
        lengths = plan.draft_lengths
        self._draft_lengths = {run.point.concurrency: lengths[0] if len(lengths) == 1 else None for run in runs}
        self._pilots: dict[int, list[float]] = {}  # draft length -> tokens and seconds, of this point
        self._warnings: Counter[str] = Counter(of_shared_cache(plan, sides))
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
                await self._look_ahead()
                for _, runs in groupby(self._runs, key=lambda run: run.point):
                    await self._point(list(runs))
                is_complete = True
            except asyncio.CancelledError:
                await self._keep()
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
        if self._lag.p99_ms > MAX_LAG_MS:
            self._warnings[
                f"the measuring process was up to {self._lag.p99_ms:.1f} ms late (99th percentile): its own work is part of the times"
            ] += 1
        self._note_differences()
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
            replay_why=self._replay.why,
        )

    async def _look_ahead(self) -> None:
        """Replay from the start if the arms are known to differ."""
        plan = self._plan
        if len(self._sides) < 2:
            return
        if plan.replay is ReplayMode.OFF:
            self._settle_replay("it was switched off")
        elif why := reason_to_replay(plan, {arm: side.facts for arm, side in self._sides.items()}):
            is_begun = await self._begin_replay(why)
            if not is_begun and (plan.recording or plan.replay is ReplayMode.ON):
                raise BadInputError(f"cannot replay: {self._replay.why}; leave --replay out")
        else:
            self._replay.is_open = not has_equal_work(plan)

    async def _point(self, runs: Sequence[Run]) -> None:
        """All runs of one setting; again by replay from the block on in which the arms turn out to differ, its earlier blocks included."""
        for run in runs:
            records = await self._run(run)
            is_twin = self._before and self._before[0].block == run.block and self._before[0].phase is run.phase is Phase.MEASURE
            if self._replay.is_open and is_twin and (different := different_answers([*self._before, *records])):
                number = f"{len(different)} of {len(records)} questions"
                why = f"the arms answered {number} differently at {run.point}, block {run.block + 1}"
                if await self._begin_replay(why):
                    self._set_aside(run.point)
                    again = [run for run in runs if run.phase is Phase.MEASURE]
                    self._expect(again)
                    await self._point(again)
                    return
            self._before = records

    async def _begin_replay(self, why: str) -> bool:
        """False where a server cannot be asked for answers of a given length."""
        self._replay.is_open = False
        for side in {id(side): side for side in self._sides.values()}.values():
            if not await gives_length(side.client, side.facts):
                self._settle_replay(
                    f"{why}, and {side.facts.base_url} cannot be asked for answers of a given length (ignore_eos, min_tokens): "
                    "answers of unequal length are compared per token"
                )
                return False
        conversations = self._plan.recording or await self._record()
        for conversation in conversations:
            self._journal.add_note(recording=conversation)
        self._replay.recording = {one.question_id: one.turns for one in conversations}
        if number := num_lost(self._plan.dataset.prompts, self._replay.recording):
            self._warnings[f"{number:,} conversations are not recorded to their end, and are measured only as far as they are"] += 1
        self._settle_replay(why)
        if warning := uncertain_caches(self._plan, self._sides):
            self._warnings[warning] += 1
        await self._warm_other_cache()
        return True

    def _settle_replay(self, why: str) -> None:
        self._replay.why = why
        self._journal.add_note(replay={"is_used": self._replay.recording is not None, "why": why})

    async def _record(self) -> tuple[RecordedConversation, ...]:
        """One pass over all prompts in the plain arm."""
        run = self._pass_over_all(Arm.BASELINE)
        return recording_of(await self._run(run), self._contents, run.prompts)

    async def _warm_other_cache(self) -> None:
        """Two servers that keep prompts whatever their salt: what the recording pass read on one, the other one reads as well."""
        base, other = (self._sides[arm] for arm in Arm)
        if base is not other and not (base.facts.separates_salts and other.facts.separates_salts) and not self._plan.recording:
            await self._run(self._pass_over_all(Arm.SPECULATIVE))

    def _pass_over_all(self, arm: Arm) -> Run:
        point = Point(min(max(self._plan.concurrencies, default=1), len(self._plan.dataset.prompts)))
        run = Run(0, point, arm, Phase.RECORD, 0, 1, self._plan.dataset.prompts, self._plan.max_tokens)
        self._expect([run])
        return run

    def _expect(self, runs: Sequence[Run]) -> None:
        """More to do than was planned."""
        self._num_total += sum(run.num_requests for run in runs)
        self._tokens_total += sum(run.num_requests * run.max_tokens for run in runs)

    def _set_aside(self, point: Point) -> None:
        """What was measured at a point before it is measured again."""
        setting = (point.concurrency, point.rate_per_s, Phase.MEASURE)
        places = {run.place for run in self._block_runs if (run.concurrency, run.rate_per_s, run.phase) == setting}
        self._journal.add_note(set_aside=sorted(places))
        self._records = [replace(one, phase=Phase.SET_ASIDE) if one.place in places else one for one in self._records]
        self._block_runs = [replace(one, phase=Phase.SET_ASIDE) if one.place in places else one for one in self._block_runs]

    def _note_differences(self) -> None:
        replayed = [record for record in self._records if record.is_replayed and record.phase is Phase.MEASURE]
        num_wrong = sum(record.error is None and record.num_output_tokens != record.max_tokens for record in replayed)
        if num_wrong:
            self._warnings[f"{num_wrong:,} of {len(replayed):,} replayed answers did not have the length that was asked for"] += 1
        if different := different_answers(record for record in self._records if not record.is_replayed):
            first = different[0]
            self._warnings[
                f"{len(different):,} questions were not answered alike in both arms (such as {first.question_id}, turn {first.turn + 1}, "
                f"from character {first.num_same_chars} on), and were not replayed: {self._replay.why or 'all answers have full length'}"
            ] += 1

    async def _run(self, run: Run) -> list[RequestRecord]:
        run = replace(run, place=self._num_runs)
        self._num_runs += 1
        num_expected = run.num_requests
        if self._replay.recording is not None and run.phase in (Phase.MEASURE, Phase.RECORD):
            run = replace(run, prompts=played(run.prompts, self._replay.recording), is_replayed=True)
        if not run.prompts:  # none of them could be recorded
            self._advance(run, num_expected)
            return []
        side, num_done = self._sides[run.arm], self._num_done
        if self._pilots and run.phase is Phase.MEASURE:
            self._choose_draft_length(run)
        self._of_run = []
        for meter in dict.fromkeys(side.meter for side in self._sides.values()):
            if (await meter.idle(_DRAIN_S)).num_busy:
                self._warnings["a server was busy with requests of others when a block began"] += 1
        before = await side.meter.read()

        send = partial(self._send, run, side)
        try:
            async with Watch(side.meter, before) as watch:
                if run.point.concurrency:
                    await closed_loop(run.prompts, run.point.concurrency, send)
                else:
                    await open_loop(run.prompts, run.point.rate_per_s, f"{self._plan.seed} {run.point} {run.block}", send)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        records = await self._keep()
        self._advance(run, num_expected - (self._num_done - num_done))  # turns that were not asked behind a failed one
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
        return records

    async def _send(self, run: Run, side: Side, prompt: Prompt, turn: int, messages: Sequence[Message]) -> Answer:
        """One request of a run; the answer is what the next turn shall see."""
        ask = self._ask(run, side.facts, prompt, turn, messages)
        answer = await side.client.complete(ask)
        record = _record(run, prompt, turn, ask, answer)
        self._note_answer(answer)
        self._of_run.append(record)
        if side.facts.has_stream_usage:
            self._journal.add_request(record)
        self._advance(run, 1)
        if run.phase is Phase.RECORD and not run.is_replayed:
            self._contents[prompt.question_id, turn] = answer.content
        if run.is_replayed and (recorded := self._replay.turn(prompt.question_id, turn)):
            answer = replace(answer, content=recorded.content)
        return replace(answer, error=None) if self._is_uncounted(record) else answer

    async def _keep(self) -> list[RequestRecord]:
        """Keep what the run in flight has; first, off the clock, count the tokens of answers that came without usage."""
        kept: list[RequestRecord] = []
        while self._of_run:
            record = self._of_run[0]
            side = self._sides[record.arm]
            if side.tokens is not None and self._is_uncounted(record):
                is_full = (
                    record.is_replayed and record.finish_reason == "length"
                )  # so long as was asked, however its text is cut into tokens
                num_tokens = record.max_tokens if is_full else await side.tokens.count(record.text)
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
        max_tokens = run.max_tokens
        if run.is_replayed and (recorded := self._replay.turn(prompt.question_id, turn)):
            # An arm that says what was recorded would find its own answers in the cache, and one that says something else would not.
            wanted |= {"cache_salt": f"{self._nonce}-{run.place}-{turn}"} | length_fields(recorded.num_tokens)
            max_tokens = recorded.num_tokens
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
        return Ask(facts.model, messages, max_tokens, self._plan.temperature, seed, fields, stream_options)

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


def _record(run: Run, prompt: Prompt, turn: int, ask: Ask, answer: Answer) -> RequestRecord:
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
        max_tokens=ask.max_tokens,
        rate_per_s=run.point.rate_per_s,
        acceptance=answer.acceptance,
        is_replayed=run.is_replayed,
    )
