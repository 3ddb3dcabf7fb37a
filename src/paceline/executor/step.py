"""One step on the device: propose -> forward -> verify -> commit. Plain decoding is the same code with no drafts.

Called by `executor/executor.py` for every plan. The law of the output lives in `speculative/verify.py`, not here.
"""

import time
from dataclasses import dataclass

from paceline.core.kv import KvPages
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import SpanKind, StepPlan
from paceline.executor.slots import SlotTable, drafts_by_row
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput, build_batch
from paceline.speculative.drafter import Drafter
from paceline.speculative.rows import sampling_rows
from paceline.speculative.verify import Rule, verify


@dataclass(frozen=True, slots=True)
class Target:
    """The main model with its KV memory and the rule its tokens are chosen by."""

    forward: Forward
    kv: KvPages
    rule: Rule


def run_step(plan: StepPlan, slots: SlotTable, drafter: Drafter, target: Target) -> StepOutcome:
    """Carry out one plan and return its truth. On return the slots hold the committed tokens."""
    started_s = time.perf_counter()
    slots.apply(plan)
    proposal = drafter.propose(plan, slots.slots)
    drafts = drafts_by_row(proposal)
    proposed_s = time.perf_counter()
    rows = _row_inputs(plan, slots, drafts)
    result = target.forward.run(build_batch(rows, target.kv.page_size), target.kv)
    forwarded_s = time.perf_counter()
    params = sampling_rows(plan.spans, slots.slots)
    verification = verify(result.logits, proposal, params, target.rule)
    new_tokens = slots.commit(plan, verification)
    drafter.observe(plan, slots.slots, verification, result.hidden)
    outcomes = tuple(
        SlotOutcome(
            slot=span.slot,
            new_token_ids=new,
            num_drafted=len(draft),
            num_accepted=max(len(new) - 1, 0),
            num_draft_computed_tokens=drafter.num_computed_tokens(span.slot),
        )
        for span, new, draft in zip(plan.spans, new_tokens, drafts, strict=True)
    )
    ended_s = time.perf_counter()
    return StepOutcome(
        step_id=plan.step_id,
        slots=outcomes,
        stats=StepStats(
            propose_ms=(proposed_s - started_s) * 1e3,
            forward_ms=(forwarded_s - proposed_s) * 1e3,
            verify_ms=(ended_s - forwarded_s) * 1e3,
            total_ms=(ended_s - started_s) * 1e3,
            num_rows=len(plan.spans),
            num_tokens=sum(len(row.token_ids) for row in rows),
            num_drafted_tokens=sum(len(draft) for draft in drafts),
            num_accepted_tokens=sum(outcome.num_accepted for outcome in outcomes),
        ),
    )


def _row_inputs(plan: StepPlan, slots: SlotTable, drafts: list[list[int]]) -> list[RowInput]:
    rows: list[RowInput] = []
    for span, draft in zip(plan.spans, drafts, strict=True):
        slot = slots.slots[span.slot]
        if span.kind is SpanKind.PREFILL:
            tokens = slot.token_ids[span.start : span.start + span.num_new_tokens]
            rows.append(RowInput(tokens, span.start, slot.page_ids, 1 if span.emits else 0))
        else:
            start = len(slot.token_ids) - 1
            assert span.start <= start <= span.start_max, f"slot {span.slot} starts at {start}, planned {span.start}..{span.start_max}"
            rows.append(RowInput([slot.token_ids[-1], *draft], start, slot.page_ids, len(draft) + 1))
    return rows
