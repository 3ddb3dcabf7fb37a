"""What an engine learned at start, as lines: printed by `serve` before it is ready, and by `doctor`."""

from collections.abc import Iterable

from paceline.cli.sizes import size_text
from paceline.config import EngineConfig
from paceline.core.facts import Choice, EngineFacts


def facts_lines(name: str, facts: EngineFacts, engine: EngineConfig) -> list[str]:
    """What was loaded and what it costs, the drafter's memory apart from the target's."""
    return [
        f"model     {name}: {facts.architecture}, {facts.dtype} on {facts.device}, {size_text(facts.target_weight_bytes)} of weights, "
        f"context {facts.max_model_len:,} tokens",
        _drafter_line(facts, engine),
        f"KV        {facts.num_pages:,} pages of {facts.page_size} tokens: {size_text(facts.num_pages * facts.target_page_bytes)} for the "
        f"target, {size_text(facts.num_pages * facts.drafter_page_bytes)} for the drafter",
        f"batch     up to {engine.max_batch_size} requests and {engine.max_num_batched_tokens} tokens per step",
    ]


def _drafter_line(facts: EngineFacts, engine: EngineConfig) -> str:
    if facts.drafter == "none":
        return "drafter   none: plain decoding"
    name = engine.draft if facts.drafter == "draft_model" else facts.drafter
    weights = f", {size_text(facts.drafter_weight_bytes)} of weights" if facts.drafter_weight_bytes else ""
    return f"drafter   {name}, up to {facts.max_draft_length} tokens per step, rule {engine.verification}{weights}"


def choice_lines(choices: Iterable[Choice]) -> list[str]:
    """The table of implementations: op, choice, reason."""
    return [f"op        {choice.name:<24} {choice.implementation:<16} {choice.reason}" for choice in choices]
