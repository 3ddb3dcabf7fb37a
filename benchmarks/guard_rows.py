"""Rows of `decode.py`: what a bad drafter costs under `--speculation auto`.

Every row is a server's life with a drafter that cannot pay, against a server without one over the same weights: above 1 the guarded one is
faster. The warm-up is the first run, in which the guard learns; what it cost stands beside, in plain steps of its batch, against the bound
of 50 and 1 %.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from engines import SMOLLM2, RandomDrafter, ask, engine, twin, window
from figures import Figure, Row
from paired import Effort, run_pairs

from paceline.core.draft import DraftProposal
from paceline.core.plan import StepPlan
from paceline.core.slot import Slot
from paceline.llm import LLM
from paceline.scheduler.guard import MAX_LOST_STEPS
from paceline.speculative.drafter import Drafter
from paceline.speculative.drafters.ngram import NgramDrafter
from paceline.speculative.drafters.none import NoDrafter

PROMPT_TOKENS = 32  # short: decoding is what is compared
NUM_TOKENS = 64
DELAY_S = 0.02
LEAST_RATIO = 0.97
LEAST_PAIRS = 20


class SlowDrafter(NgramDrafter):
    """Prompt lookup that takes 20 ms more whenever it is asked."""

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        if any(span.draft_budget for span in plan.spans):
            time.sleep(DELAY_S)
        return super().propose(plan, slots)


def guarded(name: str, drafter: type[Drafter], num_requests: int) -> Callable[[Effort], Sequence[Figure]]:
    def measure(effort: Effort) -> list[Figure]:
        llm = engine(SMOLLM2)
        ours, plain = twin(llm, drafter), twin(llm, NoDrafter)
        asked = {id(ours): 0, id(plain): 0}
        first_s: list[float] = []

        def arm(server: LLM) -> float:
            """Seconds of decoding: all tokens less the first, which carries the prompt."""
            start = asked[id(server)]
            asked[id(server)] += num_requests
            prompts = [window(server, start + place, PROMPT_TOKENS, stride=7) for place in range(num_requests)]
            return max(output.stats.decode_ms for output in ask(server, prompts, NUM_TOKENS)) / 1e3

        def guarded_arm() -> float:
            first_s.append(arm(ours))
            return first_s[-1]

        paired = run_pairs(guarded_arm, lambda: arm(plain), effort)
        ratio, stats = paired.ratio(), ours.stats()
        num_steps = NUM_TOKENS - 1
        lost_steps = first_s[0] / (statistics.median(paired.b_s) / num_steps) - num_steps
        details = {
            "passed": len(paired.a_s) >= LEAST_PAIRS and ratio[0] >= LEAST_RATIO and lost_steps <= MAX_LOST_STEPS + 0.01 * num_steps,
            "first_run_ratio": round(statistics.median(paired.b_s) / first_s[0], 3),
            "first_run_lost_steps": round(lost_steps, 1),
            "tok_s": round(num_requests * num_steps / statistics.median(paired.a_s), 2),
            "num_draft_tokens": stats.num_draft_tokens,
            "num_generation_tokens": stats.num_generation_tokens,
            "switch_offs": stats.num_switch_offs_by_reason,
            "num_pairs": len(paired.a_s),
            "num_dropped": paired.num_dropped,
        }
        first = f"{details['first_run_ratio']}, cost {details['first_run_lost_steps']} steps"
        what = f"goal {LEAST_RATIO}; the first run, in which the guard learns, {first}"
        return [Figure(name, ratio, "x", what, None, details)]

    return measure


GUARD: dict[str, Row] = {
    name: Row(guarded(name, drafter, num_requests))
    for name, drafter, num_requests in (
        ("random-1", RandomDrafter, 1),
        ("random-8", RandomDrafter, 8),
        ("slow-1", SlowDrafter, 1),
        ("slow-8", SlowDrafter, 8),
    )
}
