"""What the rows of `decode.py` ask of an engine: models loaded once, engines over one copy of their weights, prompts and timings."""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import paired  # noqa: F401 - sets the served engine's OpenMP environment before torch is loaded

from paceline.config import EngineConfig
from paceline.core.draft import DraftProposal
from paceline.core.plan import StepPlan
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.engine.loop import EngineLoop
from paceline.executor.executor import Executor
from paceline.llm import LLM, Output
from paceline.prove.datasets import shipped, subset
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative.drafter import Drafter, DrafterSetup
from paceline.speculative.drafters.none import NoDrafter
from paceline.weights.catalog import find_model
from paceline.weights.store import default_store

PROMPTS = Path(__file__).parent / "prompts"
SMOLLM2 = "smollm2-135m-instruct"
QWEN_SMALL = "qwen2.5-coder-0.5b-instruct"
QWEN = "qwen2.5-coder-1.5b-instruct"
_KV_BYTES = 512 << 20
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the form of all three models
_PER_CATEGORY = 4  # requests that the quick set is drawn for, as in `paceline prove --quick`


class RandomDrafter(NoDrafter):
    """Any tokens."""

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._vocab_size = setup.vocab_size
        self._random = random.Random(0)

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        return DraftProposal([[self._random.randrange(self._vocab_size) for _ in range(span.draft_budget)] for span in plan.spans])


@cache
def engine(model: str, quantization: str = "auto", draft: str = "ngram", threads: int | None = None) -> LLM:
    """Loaded once in this process. It caches no prefixes: repeated prompts cost what new ones do."""
    config = EngineConfig(
        model=model,
        quantization=quantization,
        draft=draft,
        threads=threads,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=_KV_BYTES,
    )
    return LLM(config)


def twin(llm: LLM, drafter: type[Drafter], max_draft_length: int | None = None) -> LLM:
    """An engine of its own over the loaded model of `llm`, with another drafter; twins must take turns and cache no prefixes.

    Of two models loaded alike one is 2 to 4 % slower, by where its weights lie. With a `max_draft_length` it always drafts so many.
    """
    config, shared, facts = llm.config, llm._loop._executor, llm.facts
    if drafter is NoDrafter:
        config, facts = replace(config, draft="none"), replace(facts, drafter="none", max_draft_length=0)
    elif max_draft_length is not None:
        config = replace(config, speculation="on", max_draft_length=max_draft_length)
        facts = replace(facts, max_draft_length=max_draft_length)
    made = copy.copy(llm)
    executor = Executor(shared._target, drafter(DrafterSetup(shared._target.rule, facts.vocab_size)), shared._slots.grammars)
    made.config, made.facts, made._received = config, facts, {}
    made._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), facts), executor)
    return made


def is_cached(model: str) -> bool:
    """Whether the catalogue's model lies in the cache whole."""
    entry, store = find_model(model), default_store()
    return entry is not None and store.is_complete(store.folder(entry.name, entry.sha256), entry.sha256)


def window(llm: LLM, number: int, num_tokens: int = 128, stride: int = 1) -> tuple[int, ...]:
    """Prompts that differ, from one text, which begins again at its end; of exactly `num_tokens`."""
    text = llm.encode((PROMPTS / "prose.txt").read_text())
    start = number * stride % len(text)
    repeated = text * (2 + num_tokens // len(text))
    return repeated[start : start + num_tokens]


@cache
def quick_set() -> tuple[str, ...]:
    """The first turns of the set that `paceline prove --quick` asks, in its order, in chat form."""
    prompts = subset.take(subset.shortest(shipped.load("qualitative"), _PER_CATEGORY), _PER_CATEGORY).prompts
    return tuple(_TURN.format(prompt.turns[0]) for prompt in prompts)


@cache
def shipped_prompts(name: str) -> tuple[str, ...]:
    """The prompts of a file of `benchmarks/prompts`: copy or code."""
    return tuple(json.loads(line)["prompt"] for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines())


def ask(llm: LLM, prompts: Sequence[str | tuple[int, ...]], num_tokens: int, max_draft_length: int | None = None) -> list[Output]:
    """Greedy answers of exactly so many tokens."""
    return llm.generate(prompts, SamplingParams(num_tokens, temperature=0, ignore_eos=True), max_draft_length)


def decode_s(llm: LLM, prompt: str | tuple[int, ...], num_tokens: int, max_draft_length: int | None = None) -> float:
    """Seconds from the first output token to the last."""
    return ask(llm, [prompt], num_tokens, max_draft_length)[0].stats.decode_ms / 1e3


def acceptance(outputs: Sequence[Output]) -> dict[str, object]:
    """Pooled over all steps of all outputs."""
    drafts = [output.stats.draft for output in outputs]
    num_accepted = sum(draft.num_accepted_tokens for draft in drafts)
    return {
        "acceptance_length": round(1 + num_accepted / max(sum(draft.num_spec_steps for draft in drafts), 1), 3),
        "acceptance_rate": round(num_accepted / max(sum(draft.num_draft_tokens for draft in drafts), 1), 3),
    }


def quantization_of(llm: LLM) -> str:
    return next((choice.implementation for choice in llm.facts.choices if choice.name == "quantization"), llm.facts.dtype)
