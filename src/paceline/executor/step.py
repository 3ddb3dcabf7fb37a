"""One step on the device: propose -> forward -> verify -> commit. Plain decoding is the same code with no drafts.

Called by `executor/executor.py` for every plan. The law of the output lives in `speculative/verify.py`, not here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.kv import KvPages
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import Span, SpanKind, StepPlan
from paceline.core.slot import Slot
from paceline.executor.slots import SlotTable, within_vocabulary
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput, build_batch
from paceline.speculative.adjust import AdjustedRows, adjust
from paceline.speculative.drafter import Drafter
from paceline.speculative.logprobs import token_logprobs
from paceline.speculative.rows import host_rows
from paceline.speculative.verify import Rule, verify


@dataclass(frozen=True, slots=True)
class Target:
    """The main model with its KV memory and the rule its tokens are chosen by."""

    forward: Forward
    kv: KvPages
    rule: Rule


@dataclass(frozen=True, slots=True)
class _SpanRun:
    """A span with its drafts, and where its logits stand: `num_logits` rows from `first_logit`, the last `num_judged` of them to judge."""

    span: Span
    slot: Slot
    drafts: list[int]
    first_logit: int
    num_logits: int
    num_judged: int

    @property
    def first_judged(self) -> int:
        return self.first_logit + self.num_logits - self.num_judged


def run_step(plan: StepPlan, slots: SlotTable, drafter: Drafter, target: Target) -> StepOutcome:
    """Carry out one plan and return its truth. On return the slots hold the committed tokens."""
    started_s = time.perf_counter()
    slots.apply(plan)
    applied_s = time.perf_counter()
    proposed = drafter.propose(plan, slots.slots)
    proposal = within_vocabulary(proposed, target.forward.spec.vocab_size)
    proposed_s = time.perf_counter()
    runs = _span_runs(plan, slots, proposal.drafts_host)
    rows = [_row_input(run) for run in runs]
    result = target.forward.run(build_batch(rows, target.kv.page_size), target.kv)
    forwarded_s = time.perf_counter()
    params = host_rows(plan.spans, slots.slots)
    verification = verify(_judged_logits(runs, result.logits), proposal, params, target.rule)
    new_tokens = slots.commit(plan, verification)
    committed_s = time.perf_counter()
    drafter.observe(plan, slots.slots, verification, result.hidden)
    observed_s = time.perf_counter()
    # Drafts that are no tokens were proposed all the same, and none of them stood: the scheduler judges the drafter by that.
    num_proposed = [len(draft) for draft in proposed.drafts_host]
    outcomes = tuple(
        _outcome(run, new, result.logits, drafter, num_drafted)
        for run, new, num_drafted in zip(runs, new_tokens, num_proposed, strict=True)
    )
    ended_s = time.perf_counter()
    propose_s = proposed_s - applied_s + observed_s - committed_s
    forward_s = forwarded_s - proposed_s
    return StepOutcome(
        step_id=plan.step_id,
        slots=outcomes,
        stats=StepStats(
            propose_ms=propose_s * 1e3,
            forward_ms=forward_s * 1e3,
            verify_ms=(ended_s - started_s - propose_s - forward_s) * 1e3,
            total_ms=(ended_s - started_s) * 1e3,
            num_rows=len(plan.spans),
            num_tokens=sum(len(row.token_ids) for row in rows),
            num_drafted_tokens=sum(num_proposed),
            num_accepted_tokens=sum(outcome.num_accepted for outcome in outcomes),
        ),
    )


def _span_runs(plan: StepPlan, slots: SlotTable, drafts: list[list[int]]) -> list[_SpanRun]:
    runs: list[_SpanRun] = []
    first_logit = 0
    for span, draft in zip(plan.spans, drafts, strict=True):
        slot = slots.slots[span.slot]
        num_judged = len(draft) + 1 if span.emits else 0
        num_logits = max(num_judged, span.num_new_tokens) if _asks_of_prompt(span, slot) else num_judged
        runs.append(_SpanRun(span, slot, draft, first_logit, num_logits, num_judged))
        first_logit += num_logits
    return runs


def _asks_of_prompt(span: Span, slot: Slot) -> bool:
    """Whether the span runs prompt tokens whose successors in the prompt are to be reported."""
    return slot.sampling.num_prompt_logprobs is not None and span.start < slot.num_prompt_tokens - 1


def _row_input(run: _SpanRun) -> RowInput:
    span, slot = run.span, run.slot
    if span.kind is SpanKind.PREFILL:
        return RowInput(slot.token_ids[span.start : span.start + span.num_new_tokens], span.start, slot.page_ids, run.num_logits)
    start = len(slot.token_ids) - 1
    assert span.start <= start <= span.start_max, f"slot {span.slot} starts at {start}, planned {span.start}..{span.start_max}"
    return RowInput([slot.token_ids[-1], *run.drafts], start, slot.page_ids, run.num_logits)


def _judged_logits(runs: Sequence[_SpanRun], logits: torch.Tensor) -> torch.Tensor:
    """The rows that verification takes, under each request's penalties, bias and bans."""
    asking = (run for run in runs if run.slot.sampling.adjusts_logits)
    adjusted = adjust(logits, [AdjustedRows(run.first_judged, run.num_judged, run.slot, run.drafts) for run in asking])
    if all(run.num_logits == run.num_judged for run in runs):
        return adjusted
    return adjusted[[row for run in runs for row in range(run.first_judged, run.first_judged + run.num_judged)]]


def _outcome(run: _SpanRun, new: tuple[int, ...], logits: torch.Tensor, drafter: Drafter, num_drafted: int) -> SlotOutcome:
    span, slot, sampling = run.span, run.slot, run.slot.sampling
    failure = None if slot.grammar is None else slot.grammar.failure
    if slot.grammar is not None and failure is not None:
        new = new[: slot.grammar.num_followed]
    logprobs = prompt_logprobs = ()
    if sampling.num_logprobs is not None:
        logprobs = token_logprobs(logits[run.first_judged : run.first_judged + len(new)], new, sampling.num_logprobs)
    if sampling.num_prompt_logprobs is not None and run.num_logits > run.num_judged:
        behind = slot.token_ids[span.start + 1 : min(span.start + span.num_new_tokens + 1, slot.num_prompt_tokens)]
        rows = logits[run.first_logit : run.first_logit + len(behind)]
        prompt_logprobs = token_logprobs(rows, behind, sampling.num_prompt_logprobs)
    return SlotOutcome(
        slot=span.slot,
        new_token_ids=new,
        num_drafted=num_drafted,
        num_accepted=max(len(new) - 1, 0),
        num_draft_computed_tokens=drafter.num_computed_tokens(span.slot),
        failure=failure,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
