"""Owns every sequence and every page: requests in, plans down, outcomes up, token deltas out. The engine loop is the only caller.

The loop may plan a step while an earlier one is in flight. How a step is filled stands in `passes.py`, slots and pages in `residents.py`.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats, TokenDelta
from paceline.core.plan import Span, SpanKind, StepPlan
from paceline.core.request import FinishReason, Request
from paceline.core.sequence import SequenceStatus
from paceline.core.stats import EngineStats
from paceline.errors import BadInputError
from paceline.scheduler.draft_length import DraftLengthPolicy, FullDraftLength, GuardedDraftLength, NoDraftLength
from paceline.scheduler.observation import ControlSteps, StepObservation
from paceline.scheduler.passes import StepBuilder, StepLimits, Work
from paceline.scheduler.read_rate import ReadRate
from paceline.scheduler.residents import Residents
from paceline.scheduler.row import Row, new_row, request_stats
from paceline.scheduler.switchback import Switchback


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The fields of EngineConfig that the scheduler plans with; meanings and defaults stand there."""

    max_num_batched_tokens: int
    min_batch_size: int
    max_batch_size: int
    batch_wait_ms: float
    enable_prefix_caching: bool
    control_share: float
    speculation: str = "auto"

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> "SchedulerConfig":
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            min_batch_size=config.min_batch_size,
            max_batch_size=config.max_batch_size,
            batch_wait_ms=config.batch_wait_ms,
            enable_prefix_caching=config.enable_prefix_caching,
            control_share=config.control_share,
            speculation=config.speculation,
        )


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    is_control: bool


class Scheduler:
    """Plans steps and commits their outcomes, in the order of the plans. Single-threaded.

    Every accepted request ends with exactly one delta that has a finish reason: at the commit that ends it, or at once when it is
    aborted; whatever steps in flight still yield for it is dropped, and its pages are free at the commit of the last of them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        facts: EngineFacts,
        draft_length: DraftLengthPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        control: ControlSteps | None = None,
    ) -> None:
        assert facts.num_pages * facts.page_size >= facts.max_model_len, (
            f"{facts.num_pages} pages of {facts.page_size} tokens cannot hold one sequence of {facts.max_model_len}"
        )
        self._config = config
        self._facts = facts
        self._policy: DraftLengthPolicy = _default_policy(config, facts) if draft_length is None else draft_length
        self._control: ControlSteps = Switchback(config.control_share, facts.drafter_keeps_kv) if control is None else control
        self._read_rate = ReadRate(facts)
        self._clock = clock
        self._limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            # Every running row gets a token in every step, so more rows than the budget has tokens would only starve some.
            max_num_running=min(config.max_batch_size, config.max_num_batched_tokens),
            max_model_len=facts.max_model_len,
            drafter_max_len=facts.drafter_max_len,
            drafter_keeps_kv=facts.drafter_keeps_kv,
        )
        self._residents = Residents(config.max_batch_size, facts.num_pages, facts.page_size, config.enable_prefix_caching)
        self._waiting: deque[Row] = deque()  # oldest first
        self._unfinished: dict[str, Row] = {}  # waiting and running, by request id
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_added = 0
        self._next_step_id = 0
        self._stats = EngineStats(num_pages=facts.num_pages, num_accepted_tokens_per_pos=[0] * facts.max_draft_length)

    @property
    def has_unfinished(self) -> bool:
        """True while any request lacks its finish reason."""
        return bool(self._unfinished)

    def add(self, request: Request) -> None:
        """Queues a request; raises BadInputError if it can never run or its id is in use."""
        self.check(request)
        engine_cap = 0 if self._facts.drafter == "none" else self._facts.max_draft_length
        draft_cap = engine_cap if request.max_draft_length is None else max(min(request.max_draft_length, engine_cap), 0)
        row = new_row(request, self._num_added, draft_cap, self._facts.eos_token_ids)
        self._num_added += 1
        self._unfinished[request.request_id] = row
        self._waiting.append(row)

    def check(self, request: Request) -> None:
        """Raises what `add` would raise."""
        num_tokens = len(request.prompt_token_ids)
        if request.request_id in self._unfinished:
            raise BadInputError(f"request id {request.request_id!r} is in use by an unfinished request; choose another", param="request_id")
        if num_tokens == 0:
            raise BadInputError("the prompt is empty; give at least one token", param="prompt")
        self._facts.check_prompt(num_tokens)
        if request.sampling.max_tokens < 1:
            raise BadInputError(f"max_tokens is {request.sampling.max_tokens}; ask for at least 1", param="max_tokens")

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Ends a request now and returns its final delta; nothing for an id that is unknown or has ended."""
        row = self._unfinished.get(request_id)
        if row is None:
            return []
        return [self._finish(row, FinishReason.ABORT, ())]

    def fail_all(self, reason: str) -> list[TokenDelta]:
        """Ends every request with ERROR. Steps in flight are forgotten: their outcomes must not be committed any more."""
        self._in_flight.clear()
        for row in self._residents.by_slot.values():
            row.in_flight.clear()
        deltas = [self._finish(row, FinishReason.ERROR, (), reason) for row in tuple(self._unfinished.values())]
        for row in tuple(self._residents.by_slot.values()):  # those that had ended before
            self._residents.release(row)
        return deltas

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before the next commit, `add` or `next_wakeup_s`."""
        if self.next_wakeup_s() is not None:
            return None
        is_control = self._control.is_control(self._can_last)
        builder = StepBuilder(self._residents, self._waiting, self._policy, self._limits, self._next_step_id, is_control)
        works = builder.build()
        self._stats.num_preemptions += len(builder.preempted)
        self._count_admissions(builder.admitted)
        if not works:
            return None
        changes = self._residents.take_changes()
        plan = StepPlan(
            step_id=self._next_step_id,
            released_slots=changes.released_slots,
            admitted=changes.admitted,
            new_pages=changes.new_pages,
            freed_pages=changes.freed_pages,
            spans=tuple(self._launch(work) for work in works),
            num_tokens_upper_bound=sum(work.num_new_tokens + work.draft_budget for work in works),
        )
        self._in_flight.append(_StepInFlight(plan.step_id, is_control))
        self._next_step_id += 1
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[TokenDelta]:
        """Takes in the truth of the oldest plan in flight; returns the new output, at most one delta per request."""
        step = self._in_flight.popleft()
        assert step.step_id == plan.step_id == outcome.step_id, (
            f"step {step.step_id} is due, plan {plan.step_id}, outcome {outcome.step_id}"
        )
        deltas: list[TokenDelta] = []
        num_rows = num_context_tokens = num_emitted_tokens = 0
        tokens_by_row: dict[int, int] = {}
        for span, slot_outcome in zip(plan.spans, outcome.slots, strict=True):
            row = self._residents.by_slot[span.slot]
            num_tokens_before = len(row.sequence.token_ids)
            oldest = row.in_flight.popleft()
            assert oldest is span, f"slot {span.slot} expects the outcome of {oldest}, not of {span}"
            if not row.is_finished:
                delta = self._commit_row(row, span, slot_outcome, step.is_control)
                if delta is not None:
                    deltas.append(delta)
            elif not row.in_flight:
                self._residents.release(row)
            if span.kind is SpanKind.DECODE:
                num_rows += 1
                num_context_tokens += num_tokens_before
                num_emitted_tokens += len(row.sequence.token_ids) - num_tokens_before
                if not row.is_finished:
                    tokens_by_row[row.order] = len(row.sequence.token_ids) - num_tokens_before
        self._count_step(outcome.stats)
        observation = StepObservation(
            num_rows=num_rows,
            num_context_tokens=num_context_tokens,
            num_drafted_tokens=outcome.stats.num_drafted_tokens,
            num_emitted_tokens=num_emitted_tokens,
            num_target_tokens=outcome.stats.num_tokens,
            has_prefill=num_rows < len(plan.spans),
            is_control=step.is_control,
            duration_ms=outcome.stats.total_ms,
            propose_ms=outcome.stats.propose_ms,
            num_allotted_tokens=sum(span.draft_budget for span in plan.spans),
            longest_draft=max(span.draft_budget for span in plan.spans),
            num_late_tokens=sum(
                max(span.draft_catch_up - 2, 0) if span.kind is SpanKind.DECODE else span.draft_catch_up for span in plan.spans
            ),
            tokens_by_row=tokens_by_row,
        )
        self._policy.observe_step(observation)
        self._control.observe_step(observation)
        self._read_rate.observe_step(observation)
        return deltas

    def next_wakeup_s(self) -> float | None:
        """When the wait of an idle engine for `min_batch_size` requests ends, on `clock`; None if it waits for nothing."""
        is_idle = not self._in_flight and not self._residents.running
        if not is_idle or not 0 < len(self._waiting) < self._config.min_batch_size:
            return None
        end_s = self._waiting[0].request.arrival_s + self._config.batch_wait_ms / 1e3
        return end_s if self._clock() < end_s else None

    def stats(self) -> EngineStats:
        """Counters since start and gauges of now, as a copy."""
        report = self._policy.report()
        return replace(
            self._stats,
            guard_state_by_band=report.states,
            draft_length_by_band=report.lengths,
            num_switch_offs_by_reason=report.num_switch_offs,
            time_s=self._clock(),
            num_running=len(self._residents.running),
            num_waiting=len(self._waiting),
            num_free_pages=self._residents.pool.num_free,
            num_accepted_tokens_per_pos=list(self._stats.num_accepted_tokens_per_pos),
            speedups=self._control.speedups(),
            decode_read_rate=self._read_rate.bytes_per_s(),
        )

    def _launch(self, work: Work) -> Span:
        span = work.span()
        work.row.in_flight.append(span)
        work.row.num_covered_tokens = span.start_max + span.num_new_tokens + span.draft_budget
        return span

    def _can_last(self, num_plain: int, num_speculative: int) -> bool:
        """Whether nobody waits, and at least half of the running rows have tokens to go for so many steps."""
        rows = self._residents.running
        num_lasting = 0
        for row in rows:
            num_left = row.request.sampling.max_tokens - row.sequence.num_output_tokens
            num_lasting += num_left > num_plain + num_speculative * (row.draft_cap + 1)
        return not self._waiting and 2 * num_lasting >= len(rows) > 0

    def _commit_row(self, row: Row, span: Span, outcome: SlotOutcome, is_control: bool) -> TokenDelta | None:
        """One row's share of an outcome: tokens, counts, pages."""
        assert outcome.slot == span.slot, f"outcome of slot {outcome.slot} stands where slot {span.slot} was planned"
        num_new = len(outcome.new_token_ids)
        assert num_new <= span.draft_budget + 1 if span.emits else num_new == 0, f"slot {span.slot} yields {num_new} tokens, planned {span}"
        assert num_new > 0 or not span.emits or outcome.failure, f"slot {span.slot} yields no token, planned {span}"
        sequence = row.sequence
        is_control = is_control and span.kind is SpanKind.DECODE and row.draft_cap > 0  # a request without drafts misses none
        sequence.draft_stats.num_control_steps += is_control
        tokens, reason = self._append(row, outcome.new_token_ids)
        error = outcome.failure if reason is None else None  # what ended before the failure has ended well
        if error is not None:
            reason = FinishReason.ERROR
        if span.kind is SpanKind.PREFILL:
            sequence.num_computed_tokens = span.start + span.num_new_tokens
        else:
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
            num_accepted = min(outcome.num_accepted, len(tokens))
            # Behind the end of the sequence nothing was judged: only what was accepted before it tells of the drafter.
            num_judged = outcome.num_drafted if reason is None else num_accepted
            self._policy.observe(row.request.request_id, span.draft_budget, num_judged, num_accepted)
            self._count_drafts(row, outcome.num_drafted, num_accepted)
        if self._limits.drafter_keeps_kv:
            # A sequence cut short by a stop token has fewer tokens than the drafter ran.
            sequence.num_draft_computed_tokens = min(outcome.num_draft_computed_tokens, len(sequence.token_ids) - 1)
        self._residents.remember(row)
        self._stats.num_generation_tokens += len(tokens)
        row.prompt_logprobs += outcome.prompt_logprobs[max(len(row.prompt_logprobs) - span.start, 0) :]  # a preempted prompt runs again
        # The first delta carries what is known so far, for a reader that ends the request itself, at a stop string.
        is_first = 0 < len(tokens) == sequence.num_output_tokens
        logprobs, prompt_logprobs = outcome.logprobs[: len(tokens)], tuple(row.prompt_logprobs) if is_first else ()
        if reason is not None:
            final = self._finish(row, reason, tokens, error)
            return replace(
                final,
                is_refusal=error is not None,
                num_drafted=outcome.num_drafted,
                is_control=is_control,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        self._residents.trim(row, row.num_covered_tokens if row.in_flight else len(sequence.token_ids))
        if not tokens:
            return None
        return TokenDelta(
            row.request.request_id,
            tokens,
            stats=request_stats(row, self._clock()) if is_first else None,
            num_drafted=outcome.num_drafted,
            is_control=is_control,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _append(self, row: Row, new_token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends up to the token that ends the sequence and says why it ends. A stop token at the limit is a stop."""
        sequence = row.sequence
        max_len = min(sequence.num_prompt_tokens + row.request.sampling.max_tokens, self._facts.max_model_len)
        if new_token_ids and row.first_token_s is None:
            row.first_token_s = self._clock()
        for num_appended, token_id in enumerate(new_token_ids, start=1):
            sequence.token_ids.append(token_id)
            if token_id in row.stop_token_ids:
                return new_token_ids[:num_appended], FinishReason.STOP
            if len(sequence.token_ids) == max_len:
                return new_token_ids[:num_appended], FinishReason.LENGTH
        return new_token_ids, None

    def _finish(self, row: Row, reason: FinishReason, tokens: tuple[int, ...], error: str | None = None) -> TokenDelta:
        """Ends an unfinished request. Slot and pages go back now, or at the commit of the last step in flight for it."""
        sequence = row.sequence
        del self._unfinished[row.request.request_id]
        self._policy.forget(row.request.request_id)
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(row)
        else:
            self._residents.stop_running(row)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.slot is not None and not row.in_flight:
            self._residents.release(row)
        return TokenDelta(row.request.request_id, tokens, reason, request_stats(row, self._clock()), error)

    def _count_admissions(self, rows: list[Row]) -> None:
        """First admissions only: a preempted row's second look into the prefix cache says nothing of the traffic."""
        for row in rows:
            if row.admitted_s is not None:
                continue
            row.admitted_s = self._clock()
            row.num_hit_tokens = row.sequence.num_computed_tokens
            self._stats.num_prompt_tokens += row.sequence.num_prompt_tokens
            if self._config.enable_prefix_caching:
                self._stats.num_prefix_query_tokens += row.sequence.num_prompt_tokens
                self._stats.num_prefix_hit_tokens += row.num_hit_tokens

    def _count_drafts(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """One decode step of a live row. Accepted drafts beyond the end of the sequence are not counted: nobody received them."""
        own = row.sequence.draft_stats
        if num_drafted == 0:
            own.num_plain_steps += 1
            return
        own.count_drafts(num_drafted, num_accepted)
        total = self._stats
        total.num_drafts += 1
        total.num_draft_tokens += num_drafted
        total.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            total.num_accepted_tokens_per_pos[position] += 1

    def _count_step(self, stats: StepStats) -> None:
        total = self._stats
        total.last_step_s = self._clock()
        total.num_steps += 1
        total.propose_s += stats.propose_ms / 1e3
        total.forward_s += stats.forward_ms / 1e3
        total.verify_s += stats.verify_ms / 1e3
        total.step_s += stats.total_ms / 1e3


def _default_policy(config: SchedulerConfig, facts: EngineFacts) -> DraftLengthPolicy:
    if facts.drafter == "none":
        return NoDraftLength()
    return FullDraftLength() if config.speculation == "on" else GuardedDraftLength(facts)
