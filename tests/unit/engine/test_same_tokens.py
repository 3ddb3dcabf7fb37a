"""The first promise: under `coupled`, output never depends on drafter, draft length, batch, preemption or chunking (float32).

Every case runs real models through the real scheduler and executor and must equal plain decoding of the same request alone.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from paceline.config import EngineConfig
from paceline.core.progress import SilentProgress
from paceline.core.request import Request, SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats
from paceline.engine.loop import EngineLoop
from paceline.executor import step
from paceline.executor.load import load_executor
from paceline.forward.inputs import RowInput
from paceline.scheduler.draft_length import DraftLengthPolicy
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.fakes.tiny_models import make_tiny_model

MAX_DRAFT_LENGTH = 8
NUM_OUTPUT_TOKENS = 40
DRAFTERS = ("none", "ngram", "draft_model")
PAGE_SIZE = 8

GREEDY = SamplingParams(NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "t0.7-top_p": replace(GREEDY, temperature=0.7, top_p=0.9, seed=11),
    "t1.3-top_p": replace(GREEDY, temperature=1.3, top_p=0.95, seed=2**64 - 5),
    "t1.0-top_k-min_p": replace(GREEDY, temperature=1.0, top_k=20, min_p=0.02, seed=7),
}


class RandomDraftLength:
    """A policy without any sense: whatever it answers, tokens must stay the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draft_length(self, sequence: Sequence, limit: int) -> int:
        return self._random.randint(0, limit)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class FullDraftLength(RandomDraftLength):
    """Always the limit, so that long drafts are tested whether or not they are accepted."""

    def draft_length(self, sequence: Sequence, limit: int) -> int:
        return limit


@dataclass(frozen=True)
class Models:
    target: Path
    draft: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target, and as its drafter the same model with noise on the weights and a larger padded vocabulary: it agrees often, not always."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
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

    def __init__(self, models: Models, config: EngineConfig, policy: DraftLengthPolicy | None = None) -> None:
        draft_folder = str(models.draft) if config.draft == "draft_model" else None
        config = replace(config, draft=str(models.draft)) if draft_folder else config
        executor, self.facts = load_executor(config, str(models.target), draft_folder, SilentProgress())
        self._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), self.facts, policy), executor)

    def run(self, requests: Seq[Request]) -> list[tuple[int, ...]]:
        """All requests as one dynamic batch; their output tokens in order."""
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._loop.add(request)
        while self._loop.has_unfinished:
            for delta in self._loop.step():
                outputs[delta.request_id].extend(delta.token_ids)
        assert self.stats().num_free_pages == self.stats().num_pages
        return [tuple(outputs[request.request_id]) for request in requests]

    def stats(self) -> EngineStats:
        return self._loop.stats()


def engine(draft: str, **changes: object) -> EngineConfig:
    config = EngineConfig(
        dtype="float32", draft=draft, max_draft_length=MAX_DRAFT_LENGTH, block_size=PAGE_SIZE, threads=1, kv_cache_memory_bytes=64 << 20
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


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[tuple[int, ...]]]:
    """Every request alone, without a drafter, in a large pool: the reference."""
    alone = Engine(models, engine("none", enable_prefix_caching=False))
    return {name: [alone.run([request])[0] for request in requests(sampling)] for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("draft", DRAFTERS)
def test_any_draft_length_alone(models: Models, plain: dict[str, list[tuple[int, ...]]], draft: str) -> None:
    each = Engine(models, engine(draft, max_batch_size=1, enable_prefix_caching=False), FullDraftLength(0))
    draft_lengths = range(MAX_DRAFT_LENGTH + 1) if draft != "none" else (MAX_DRAFT_LENGTH,)
    for name, sampling in SAMPLINGS.items():
        for max_draft_length in draft_lengths:
            num_drafted = each.stats().num_draft_tokens
            assert each.run(requests(sampling, max_draft_length)) == plain[name], f"{name}, K={max_draft_length}"
            if name == "greedy":  # hot samples hold too few repeats for every length to find one
                has_drafted = each.stats().num_draft_tokens > num_drafted
                assert has_drafted == (draft != "none" and max_draft_length > 0)


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_size": 6},
        {"max_batch_size": 3, "max_num_batched_tokens": 16},
        {"max_batch_size": 6, "max_num_batched_tokens": 7},
        {"max_batch_size": 6, "max_model_len": 104, "num_pages": 24},
        {"max_batch_size": 5, "max_model_len": 104, "num_pages": 16, "max_num_batched_tokens": 13, "enable_prefix_caching": False},
    ],
    ids=["batch", "split", "tiny-budget", "preempted", "preempted-split"],
)
def test_batches_chunks_and_preemption(
    models: Models, plain: dict[str, list[tuple[int, ...]]], draft: str, changes: dict[str, object]
) -> None:
    """Random draft lengths in every batch mix; small pools force preemption, small budgets split prompts."""
    changes = dict(changes)
    num_pages = changes.pop("num_pages", None)
    config = engine(draft, **changes)
    if num_pages is not None:
        facts = Engine(models, engine(draft)).facts
        config = replace(config, kv_cache_memory_bytes=int(str(num_pages)) * (facts.target_page_bytes + facts.drafter_page_bytes))
    together = Engine(models, config, RandomDraftLength(len(draft)))
    for name, sampling in SAMPLINGS.items():
        assert together.run(requests(sampling)) == plain[name], name
    if num_pages is not None:
        assert together.stats().num_preemptions > 0, "the pool was not small enough to test preemption"


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_drafts_are_accepted(models: Models, draft: str) -> None:
    """The equality above would mean little if no draft were ever accepted, or every one."""
    drafted = Engine(models, engine(draft), FullDraftLength(0))
    drafted.run(requests(GREEDY))
    assert 0.05 < drafted.stats().num_accepted_tokens / drafted.stats().num_draft_tokens < 0.98


def test_a_draft_model_with_a_smaller_embedding(models: Models) -> None:
    """Here the padded model is the target: its ids beyond the drafter's 320 rows must neither fail nor change a token."""
    wide = Models(models.draft, models.target)
    prompts_beyond = [replace(request, prompt_token_ids=(340, *request.prompt_token_ids, 351)) for request in requests(GREEDY)]
    expected = Engine(wide, engine("none")).run(prompts_beyond)
    assert Engine(wide, engine("draft_model")).run(prompts_beyond) == expected


@pytest.mark.parametrize("architecture", ["llama3", "qwen2", "qwen3"])
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    target = make_tiny_model(tmp_path / architecture, architecture)
    each = Models(target, target)
    alone = Engine(each, engine("none"))
    expected = [alone.run([request])[0] for request in requests(SAMPLINGS["t0.7-top_p"])]
    for draft in ("ngram", "draft_model"):
        assert Engine(each, engine(draft, max_num_batched_tokens=20)).run(requests(SAMPLINGS["t0.7-top_p"])) == expected


def test_a_planted_fault_is_noticed(models: Models, plain: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that run one position too early read and write the wrong keys: the comparison must fail."""
    honest = step._row_inputs

    def shifted(*arguments: object) -> list[RowInput]:
        rows = honest(*arguments)  # type: ignore[arg-type]
        return [replace(row, start=max(row.start - 1, 0)) if row.num_logits > 1 else row for row in rows]

    monkeypatch.setattr(step, "_row_inputs", shifted)
    assert Engine(models, engine("ngram"), FullDraftLength(0)).run(requests(GREEDY)) != plain["greedy"]
