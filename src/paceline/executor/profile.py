"""Measures at start what steps cost, so that the first requests already draft at the right length. Called once, before any request.

It runs real steps on slots of its own: pages are free and their content does not matter, for a step takes as long whatever they hold.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.core.outcome import StepOutcome
from paceline.core.plan import Admission, Span, SpanKind, StepPlan
from paceline.core.request import SamplingParams
from paceline.executor.cost_cache import CostCache, cost_key
from paceline.executor.executor import Executor
from paceline.executor.step_kinds import Kind, Measured, Measurement

BUDGET_S = 2.0
MAX_ROUNDS = 2
"""Starts that measure what earlier ones had no time for; what is missing then is learned from live steps alone."""
_MIN_STEPS = 2
_MAX_STEPS = 3
_MAX_FIRST_STEPS = 5  # of the first kind: the runner compiles in its first passes
_STEADY = 1.1  # two steps in a row whose times differ by a smaller factor: more of them would tell nothing new
_CHANGED = 1.2  # a plain step that differs from the known one by a larger factor: one of them was taken on a busy machine
_MAX_CHECKED_MS = 200.0  # slower plain steps are not checked at each start, for which somebody waits
_CONTEXT = 64
_LONG_CONTEXT = 1024
_TOKEN = 1  # repeated: prompt lookup always finds the text to go on as it did

RunStep = Callable[[StepPlan], StepOutcome]
"""Runs a step on slots that are new each time."""


def grid(max_drafts: int) -> list[Kind]:
    """What to measure, the most telling kinds first, a plain step of one row before all: time may not suffice for all."""
    lengths = sorted({min(length, max_drafts) for length in (1, 2, 3, 5, max_drafts)})
    single = [Kind(1, 0, _CONTEXT), *(Kind(1, length, _CONTEXT) for length in lengths)]
    longest = min(3, max_drafts)
    batches = [Kind(8, 1, _CONTEXT), Kind(8, longest, _CONTEXT), Kind(16, longest, _CONTEXT), Kind(16, 0, _CONTEXT)]
    return list(dict.fromkeys((*single, Kind(8, 0, _CONTEXT), Kind(1, 0, _LONG_CONTEXT), *batches)))


def with_step_costs(config: EngineConfig, executor: Executor, facts: EngineFacts) -> EngineFacts:
    """`facts` with what steps cost: from the cache on disk, where what is missing is measured in about BUDGET_S and put there.

    Unchanged where nothing depends on it: without a drafter, without the guard, or if the configuration says so.
    """
    if facts.drafter == "none" or config.speculation != "auto" or not config.measure_steps:
        return facts
    cache = CostCache(cost_key(config, facts, torch.__version__, torch.get_num_threads()))
    known = cache.read()
    measured = measure(facts, config.max_batch_size, executor.run_apart, known)
    if measured != known:
        cache.write(measured)
    return replace(facts, step_costs=measured.costs())


def measure(
    facts: EngineFacts, max_batch_size: int, run: RunStep, known: Measured | None = None, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """`known`, with what it lacks of the grid within the engine's limits. What would not be done before BUDGET_S is left out.

    At most MAX_ROUNDS starts add to what is known. A plain step then shows whether it holds. Where the machine has become faster, it
    was busy, and all is measured anew. Where it has become slower, it is busy now, and what it takes now is not added.
    """
    kinds = [kind for kind in grid(facts.max_draft_length) if _fits(kind, facts, max_batch_size)]
    if not kinds:
        return Measured()
    end_s = clock() + BUDGET_S
    before = None if known is None else known.find(kinds[0])
    if known is None or before is None:
        return _one_round(kinds, Measured(), _Steps(facts, run, clock, end_s))
    is_due = known.num_rounds < MAX_ROUNDS and bool(known.missing(kinds))
    if not is_due and before.target_ms > _MAX_CHECKED_MS:
        return known
    steps = _Steps(facts, run, clock, end_s)
    plain = steps.measure(kinds[0], _MAX_FIRST_STEPS)
    if plain.target_ms * _CHANGED < before.target_ms:
        return _one_round(kinds, Measured((plain,)), steps)
    if not is_due or plain.target_ms > before.target_ms * _CHANGED:
        return known
    return _one_round(kinds, known, steps)


def _one_round(kinds: Sequence[Kind], known: Measured, steps: "_Steps") -> Measured:
    """`known`, with those of `kinds` that it lacks and that there is time for."""
    done = list(known.measurements)
    for kind in known.missing(kinds):
        if not done:
            done.append(steps.measure(kind, _MAX_FIRST_STEPS))
        elif _MIN_STEPS * _expected_ms(kind, done) <= steps.left_ms():
            done.append(steps.measure(kind, _MAX_STEPS))
    return Measured(tuple(done), known.num_rounds + 1)


def _expected_ms(kind: Kind, done: Sequence[Measurement]) -> float:
    """At most about what a step takes: as long per token as the largest one that has no more tokens, for more take less time each."""
    fewer = [measurement for measurement in done if measurement.num_tokens <= kind.num_tokens] or done
    nearest = max(fewer, key=lambda measurement: measurement.num_tokens)
    return (nearest.target_ms + nearest.drafter_ms) / nearest.num_tokens * kind.num_tokens


class _Steps:
    """Runs steps to measure them, until `end_s` by `clock`."""

    def __init__(self, facts: EngineFacts, run: RunStep, clock: Callable[[], float], end_s: float) -> None:
        self._facts = facts
        self._run = run
        self._clock = clock
        self._end_s = end_s

    def left_ms(self) -> float:
        return (self._end_s - self._clock()) * 1e3

    def measure(self, kind: Kind, max_steps: int) -> Measurement:
        """The best of a few steps of a kind: what comes in between, compiling above all, only adds.

        It is the same step again and again: where the text goes on as the model likes, prompt lookup would find no drafts.
        """
        plan = _plan(kind, self._facts)
        outcomes = [self._run(plan) for _ in range(_MIN_STEPS)]
        while len(outcomes) < max_steps and not _is_steady(outcomes) and outcomes[-1].stats.total_ms <= self.left_ms():
            outcomes.append(self._run(plan))
        num_tokens = outcomes[-1].stats.num_tokens
        target_ms = min(outcome.stats.total_ms - outcome.stats.propose_ms for outcome in outcomes)
        return Measurement(kind, num_tokens, target_ms, min(outcome.stats.propose_ms for outcome in outcomes))


def _is_steady(outcomes: Sequence[StepOutcome]) -> bool:
    low, high = sorted(outcome.stats.total_ms for outcome in outcomes[-2:])
    return high <= low * _STEADY


def _fits(kind: Kind, facts: EngineFacts, max_batch_size: int) -> bool:
    num_tokens = _num_covered_tokens(kind)
    has_pages = kind.num_rows * -(-num_tokens // facts.page_size) <= facts.num_pages
    return has_pages and kind.num_rows <= max_batch_size and num_tokens <= min(facts.max_model_len, facts.drafter_max_len)


def _num_covered_tokens(kind: Kind) -> int:
    """What one row may come to have."""
    return kind.num_context_tokens + kind.num_drafts + 1


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
