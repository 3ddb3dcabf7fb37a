"""Tiny real models in real engines, run to the end: what the tests of equal tokens compare."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from paceline.config import EngineConfig
from paceline.core.outcome import TokenDelta
from paceline.core.progress import SilentProgress
from paceline.core.request import Request, SamplingParams
from paceline.core.stats import EngineStats
from paceline.engine.loop import EngineLoop
from paceline.executor.load import load_executor
from paceline.scheduler import draft_length
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.fakes.tiny_models import make_tiny_model

MAX_DRAFT_LENGTH = 8
PAGE_SIZE = 8


class RandomDraftLength(draft_length.FullDraftLength):
    """A policy without any sense: whatever it answers, tokens must stay the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def allot(self, rows: Seq[draft_length.DraftRow], num_tokens_left: int) -> list[int]:
        return [self._random.randint(0, row.limit) for row in rows]


class FullDraftLength(RandomDraftLength):
    """Always the limit, so that long drafts are tested whether or not they are accepted."""

    def allot(self, rows: Seq[draft_length.DraftRow], num_tokens_left: int) -> list[int]:
        return [row.limit for row in rows]


@dataclass(frozen=True)
class Models:
    target: Path
    draft: Path


def make_models(root: Path) -> Models:
    """A target, and as its drafter the same model with noise on the weights and a larger padded vocabulary: it agrees often, not always."""
    torch.set_num_threads(1)
    target = make_tiny_model(root / "target", "llama", vocab_size=320)
    draft = make_tiny_model(root / "draft", "llama", vocab_size=352)
    tensors = load_file(target / "model.safetensors")
    rng = np.random.default_rng(1)
    padded = {name: tensor + 0.05 * rng.standard_normal(tensor.shape).astype(np.float32) * tensor.std() for name, tensor in tensors.items()}
    embedding = padded["model.embed_tokens.weight"]
    padded["model.embed_tokens.weight"] = np.concatenate([embedding, np.ones((32, embedding.shape[1]), np.float32)])
    save_file(padded, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return Models(target, draft)


class Engine:
    """One loaded engine, used for many batches of requests: loading costs more than a batch of a tiny model."""

    def __init__(self, models: Models, config: EngineConfig, policy: draft_length.DraftLengthPolicy | None = None) -> None:
        draft_folder = str(models.draft) if config.draft == "draft_model" else None
        config = replace(config, draft=str(models.draft)) if draft_folder else config
        executor, self.facts = load_executor(config, str(models.target), draft_folder, SilentProgress())
        self.loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), self.facts, policy), executor)

    def run(self, requests: Seq[Request]) -> list[tuple[int, ...]]:
        """All requests as one dynamic batch; their output tokens in order."""
        return [tuple(token for delta in deltas for token in delta.token_ids) for deltas in self.deltas(requests)]

    def deltas(self, requests: Seq[Request]) -> list[list[TokenDelta]]:
        """The same with all that the deltas say."""
        outputs: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.loop.add(request)
        while self.loop.has_unfinished:
            for delta in self.loop.step():
                outputs[delta.request_id].append(delta)
        assert self.stats().num_free_pages == self.stats().num_pages
        return [outputs[request.request_id] for request in requests]

    def stats(self) -> EngineStats:
        return self.loop.stats()


def engine(draft: str, **changes: object) -> EngineConfig:
    """Without the guard, unless asked for: whether a tiny model drafts at all would depend on how busy the machine is."""
    config = EngineConfig(
        dtype="float32",
        draft=draft,
        speculation="on",
        max_draft_length=MAX_DRAFT_LENGTH,
        block_size=PAGE_SIZE,
        threads=1,
        kv_cache_memory_bytes=64 << 20,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def prompts(count: int = 6) -> list[tuple[int, ...]]:
    """Random, periodic and mixed prompts of 1 to 60 tokens, so that lookup hits often and misses often."""
    rng = random.Random(5)
    periodic = [rng.randrange(3, 300) for _ in range(7)]
    kinds = [
        [rng.randrange(3, 300)],
        periodic * 5,
        [rng.randrange(3, 300) for _ in range(23)],
        periodic + [rng.randrange(3, 300) for _ in range(10)] + periodic,
        [rng.randrange(3, 300) for _ in range(60)],
        [9] * 31,
    ]
    return [tuple(kinds[i % len(kinds)]) for i in range(count)]


def requests(sampling: SamplingParams, max_draft_length: int | None = None) -> list[Request]:
    return [
        Request(f"r{i}", prompt, replace(sampling, seed=(sampling.seed or 0) ^ (i << 8)), 0.0, max_draft_length)
        for i, prompt in enumerate(prompts())
    ]
