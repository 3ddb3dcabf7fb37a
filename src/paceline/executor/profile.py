"""Measures at start what steps cost, so that the first requests already draft at the right length. Called once, before any request.

It runs real steps on slots of its own: pages are free and their content does not matter, for a step takes as long whatever they hold.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.core.facts import DrafterCost, EngineFacts, StepCosts, TargetCost
from paceline.core.outcome import StepOutcome
from paceline.core.plan import Admission, Span, SpanKind, StepPlan
from paceline.core.request import SamplingParams
from paceline.executor.cost_cache import CostCache, cost_key
from paceline.executor.executor import Executor

BUDGET_S = 2.0
_NUM_REPEATS = 2
_NUM_WARM_STEPS = 3  # the runner compiles in its first passes
_CONTEXT = 64
_LONG_CONTEXT = 1024
_TOKEN = 1  # repeated: prompt lookup always finds the text to go on as it did

RunStep = Callable[[StepPlan], StepOutcome]
"""Runs a step on slots that are new each time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of decode step: drafts are per row."""

    num_rows: int
    num_drafts: int
    num_context_tokens: int = _CONTEXT

    @property
    def num_tokens(self) -> int:
        return self.num_rows * (self.num_drafts + 1)


def grid(max_drafts: int) -> list[Kind]:
    """What to measure, the most telling kinds first: time may not suffice for all."""
    lengths = sorted({min(length, max_drafts) for length in (1, 2, 3, 5, max_drafts)})
    kinds = [Kind(1, 0), *(Kind(1, length) for length in lengths), Kind(8, 0), Kind(1, 0, _LONG_CONTEXT)]
    return [*kinds, Kind(8, 1), Kind(4, min(3, max_drafts)), Kind(16, 0), Kind(8, min(3, max_drafts)), Kind(16, min(3, max_drafts))]


def with_step_costs(config: EngineConfig, executor: Executor, facts: EngineFacts) -> EngineFacts:
    """`facts` with what steps cost: from the cache on disk, or measured in about BUDGET_S and put there.

    Unchanged where nothing depends on it: without a drafter, without the guard, or if the configuration says so.
    """
    if facts.drafter == "none" or config.speculation != "auto" or not config.measure_steps:
        return facts
    cache = CostCache(cost_key(config, facts, torch.__version__, torch.get_num_threads()))
    costs = cache.read()
    if costs is None:
        costs, is_complete = measure(facts, config.max_batch_size, executor.run_apart)
        if is_complete:  # a machine that is busy now may be quiet at the next start
            cache.write(costs)
    return replace(facts, step_costs=costs)


def measure(
    facts: EngineFacts, max_batch_size: int, run: RunStep, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepCosts, bool]:
    """Step times by kind, each the best of a few, and whether there was time for all kinds within the engine's limits.

    What would not be done before BUDGET_S is left out.
    """
    target: list[TargetCost] = []
    drafter: list[DrafterCost] = []
    started_s = clock()
    kinds = [kind for kind in grid(facts.max_draft_length) if _fits(kind, facts, max_batch_size)]
    for _ in range(_NUM_WARM_STEPS if kinds else 0):
        _run_kind(kinds[0], facts, run, 1)
        if clock() - started_s > BUDGET_S / 4:
            break
    ms_per_token, num_left_out = 0.0, 0
    for kind in kinds:
        left_ms = (BUDGET_S - (clock() - started_s)) * 1e3
        if ms_per_token * kind.num_tokens * (_NUM_REPEATS + 1) > left_ms:
            num_left_out += 1
            continue
        outcomes = _run_kind(kind, facts, run, _NUM_REPEATS + 1)[1:]
        num_tokens = outcomes[-1].stats.num_tokens
        target_ms = min(outcome.stats.total_ms - outcome.stats.propose_ms for outcome in outcomes)
        propose_ms = min(outcome.stats.propose_ms for outcome in outcomes)
        ms_per_token = (target_ms + propose_ms) / num_tokens  # more tokens take less time each
        target.append(TargetCost(kind.num_rows, num_tokens, kind.num_context_tokens, target_ms))
        num_drafts = num_tokens // kind.num_rows - 1
        if num_drafts:
            drafter.append(DrafterCost(kind.num_rows, num_drafts, propose_ms))
    return StepCosts(tuple(target), tuple(drafter)), num_left_out == 0


def _fits(kind: Kind, facts: EngineFacts, max_batch_size: int) -> bool:
    num_tokens = _num_covered_tokens(kind)
    has_pages = kind.num_rows * -(-num_tokens // facts.page_size) <= facts.num_pages
    return has_pages and kind.num_rows <= max_batch_size and num_tokens <= min(facts.max_model_len, facts.drafter_max_len)


def _num_covered_tokens(kind: Kind) -> int:
    """What one row may come to have."""
    return kind.num_context_tokens + kind.num_drafts + 1


def _run_kind(kind: Kind, facts: EngineFacts, run: RunStep, num_steps: int) -> list[StepOutcome]:
    """The same step again and again: where the text goes on as the model likes, prompt lookup would find no drafts."""
    plan = _plan(kind, facts)
    return [run(plan) for _ in range(num_steps)]


def _plan(kind: Kind, facts: EngineFacts) -> StepPlan:
    num_pages = -(-_num_covered_tokens(kind) // facts.page_size)
    length = kind.num_context_tokens
    text = (min(_TOKEN, facts.vocab_size - 1),) * length
    sampling = SamplingParams(max_tokens=facts.max_model_len, temperature=0.0, ignore_eos=True)
    spans = tuple(
        Span(
            slot=slot,
            kind=SpanKind.DECODE,
            start=length - 1,
            start_max=length - 1,
            num_new_tokens=1,
            draft_budget=kind.num_drafts,
            draft_catch_up=1 if kind.num_drafts and facts.drafter_keeps_kv else 0,
            emits=True,
        )
        for slot in range(kind.num_rows)
    )
    return StepPlan(
        step_id=0,
        released_slots=(),
        admitted=tuple(Admission(slot, text, length, sampling, (), length - 1, length - 1) for slot in range(kind.num_rows)),
        new_pages=tuple((slot, tuple(range(slot * num_pages, (slot + 1) * num_pages))) for slot in range(kind.num_rows)),
        freed_pages=(),
        spans=spans,
        num_tokens_upper_bound=kind.num_tokens,
    )
