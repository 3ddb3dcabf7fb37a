"""What a bad drafter costs under `--speculation auto`: `python benchmarks/guard.py [ROW ...] [--pairs N]`.

Every row is a server's life with a drafter that cannot pay, against a server without one over the same weights: interleaved pairs, the
ratio of medians with its 95 % interval, above 1 where the guarded server is faster. The first pair, in which the guard learns, is the
warm-up; what it cost stands beside. Results are printed and appended to benchmarks/results/guard-cpu.jsonl.
"""

import argparse
import copy
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from paired import append_result, environment, run_pairs  # sets the served engine's OpenMP environment

from paceline.config import EngineConfig
from paceline.core.draft import DraftProposal
from paceline.core.plan import StepPlan
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.engine.loop import EngineLoop
from paceline.executor.executor import Executor
from paceline.llm import LLM
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative.drafter import Drafter, DrafterSetup, proposal_from_lists
from paceline.speculative.drafters.ngram import NgramDrafter
from paceline.speculative.drafters.none import NoDrafter

RESULTS = Path(__file__).parent / "results" / "guard-cpu.jsonl"
TEXT = Path(__file__).parent / "prompts" / "prose.txt"
SMOLLM2 = "smollm2-135m-instruct"
PROMPT_TOKENS = 32
NUM_TOKENS = 64
DELAY_S = 0.02
LEAST_RATIO = 0.97


class RandomDrafter(NoDrafter):
    """Any tokens."""

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._vocab_size = setup.vocab_size
        self._random = random.Random(0)

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        return proposal_from_lists([[self._random.randrange(self._vocab_size) for _ in range(span.draft_budget)] for span in plan.spans])


class SlowDrafter(NgramDrafter):
    """Prompt lookup that takes 20 ms more whenever it is asked."""

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        if any(span.draft_budget for span in plan.spans):
            time.sleep(DELAY_S)
        return super().propose(plan, slots)


ROWS: dict[str, tuple[type[Drafter], int]] = {
    "random-1": (RandomDrafter, 1),
    "random-8": (RandomDrafter, 8),
    "slow-1": (SlowDrafter, 1),
    "slow-8": (SlowDrafter, 8),
}


def run_row(llm: LLM, drafter: type[Drafter], num_requests: int, num_pairs: int) -> dict[str, object]:
    guarded, plain = _twin(llm, drafter), _twin(llm, NoDrafter)
    first_s: list[float] = []

    def arm(engine: LLM, windows: Iterator[tuple[int, ...]]) -> float:
        """Seconds of decoding: all tokens less the first, which carries the prompt."""
        prompts = [next(windows) for _ in range(num_requests)]
        outputs = engine.generate(prompts, SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True))
        return max(output.stats.decode_ms for output in outputs) / 1e3

    guarded_windows, plain_windows = _windows(llm), _windows(llm)

    def guarded_arm() -> float:
        first_s.append(arm(guarded, guarded_windows))
        return first_s[-1]

    paired = run_pairs(guarded_arm, lambda: arm(plain, plain_windows), num_pairs)
    ratio, low, high = paired.ratio()
    stats = guarded.stats()
    return {
        "ratio": round(ratio, 3),
        "ci95": [round(low, 3), round(high, 3)],
        "passed": ratio >= LEAST_RATIO,
        "first_run_ratio": round(statistics.median(paired.b_s) / first_s[0], 3),
        "tok_s": round(num_requests * (NUM_TOKENS - 1) / statistics.median(paired.a_s), 2),
        "num_draft_tokens": stats.num_draft_tokens,
        "num_generation_tokens": stats.num_generation_tokens,
        "switch_offs": stats.num_switch_offs_by_reason,
        "num_pairs": num_pairs,
        "num_dropped": paired.num_dropped,
    }


def _twin(llm: LLM, drafter: type[Drafter]) -> LLM:
    """An engine of its own over the loaded model of `llm`, with another drafter; twins must take turns and cache no prefixes."""
    config, shared = llm.config, llm._loop._executor
    facts = llm.facts
    if drafter is NoDrafter:
        config, facts = replace(config, draft="none"), replace(facts, drafter="none", max_draft_length=0)
    twin = copy.copy(llm)
    made = drafter(DrafterSetup(shared._target.rule, facts.vocab_size))
    executor = Executor(shared._target, made, shared._slots.grammars)
    twin.config, twin.facts, twin._received = config, facts, {}
    twin._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), facts), executor)
    return twin


def _windows(llm: LLM) -> Iterator[tuple[int, ...]]:
    """Prompts that differ, short ones: decoding is what is compared."""
    text = llm.encode(TEXT.read_text())
    return itertools.cycle(text[start : start + PROMPT_TOKENS] for start in range(0, len(text) - PROMPT_TOKENS, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"which of {', '.join(ROWS)}; all, if none is given")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--model", default=SMOLLM2)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]}; rows are {', '.join(ROWS)}")
    llm = LLM(EngineConfig(model=arguments.model, enable_prefix_caching=False))
    for name in arguments.rows or ROWS:
        figures = run_row(llm, *ROWS[name], arguments.pairs)
        append_result(RESULTS, {"row": name, "model": arguments.model, **figures, **environment()})
        print(f"{name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
