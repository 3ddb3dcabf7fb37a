"""The first promise: under `coupled`, output never depends on drafter, draft length, batch, preemption, chunking or threads.

In float32, and on the native step with weights of 8 and 4 bits.

Every case runs real models through the real scheduler and executor and must equal plain decoding of the same request alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.outcome import TokenDelta
from paceline.core.request import SamplingParams
from paceline.executor import step
from paceline.forward.inputs import RowInput
from paceline.speculative.drafter import DRAFTERS
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.token_engine import (
    MAX_DRAFT_LENGTH,
    PAGE_SIZE,
    Engine,
    FullDraftLength,
    Models,
    RandomDraftLength,
    engine,
    make_models,
    requests,
)

NUM_OUTPUT_TOKENS = 32
NEAR_TIE = 1e-3  # in natural logarithms

GREEDY = SamplingParams(NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "t0.7-top_p": replace(GREEDY, temperature=0.7, top_p=0.9, seed=11),
    "t1.3-top_p": replace(GREEDY, temperature=1.3, top_p=0.95, seed=2**64 - 5),
    "t1.0-top_k-min_p": replace(GREEDY, temperature=1.0, top_k=20, min_p=0.02, seed=7),
}

WEIGHTS = {
    "float32": {"dtype": "float32"},
    "int4": {"dtype": "auto", "quantization": "int4"},  # embedding and head have 8 bits, so both kinds of products run
}


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest) -> dict[str, str]:
    """The configuration of each kind of weights."""
    return WEIGHTS[request.param]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: Models, weights: dict[str, str]) -> dict[str, list[tuple[int, ...]]]:
    """Every request alone, without a drafter, in a large pool: the reference."""
    alone = Engine(models, engine("none", **weights, enable_prefix_caching=False))
    return {name: [alone.run([request])[0] for request in requests(sampling)] for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("draft", [name for name in DRAFTERS if name != "none"])
def test_any_draft_length_alone(models: Models, weights: dict[str, str], plain: dict[str, list[tuple[int, ...]]], draft: str) -> None:
    """Every length with two greedy requests that repeat themselves, then all samplings with each request at a length of its own."""
    each = Engine(models, engine(draft, **weights, max_batch_size=1, enable_prefix_caching=False), FullDraftLength(0))
    for max_draft_length in range(MAX_DRAFT_LENGTH + 1):
        num_drafted = each.stats().num_draft_tokens
        assert each.run(requests(GREEDY, max_draft_length)[1:4:2]) == plain["greedy"][1:4:2], f"K={max_draft_length}"
        assert (each.stats().num_draft_tokens > num_drafted) == (max_draft_length > 0)
    for name, sampling in SAMPLINGS.items():
        mixed = [replace(request, max_draft_length=MAX_DRAFT_LENGTH - i) for i, request in enumerate(requests(sampling))]
        assert each.run(mixed) == plain[name], name


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
    models: Models, weights: dict[str, str], plain: dict[str, list[tuple[int, ...]]], draft: str, changes: dict[str, object]
) -> None:
    """All samplings at random draft lengths in every batch mix; small pools force preemption, small budgets split prompts."""
    changes = dict(changes)
    num_pages = changes.pop("num_pages", None)
    config = engine(draft, **weights, **changes)
    if num_pages is not None:
        facts = Engine(models, engine(draft, **weights)).facts
        config = replace(config, kv_cache_memory_bytes=int(str(num_pages)) * (facts.target_page_bytes + facts.drafter_page_bytes))
    together = Engine(models, config, RandomDraftLength(len(draft)))
    mixed = [
        replace(request, request_id=f"{name}-{request.request_id}")
        for name, sampling in SAMPLINGS.items()
        for request in requests(sampling)
    ]
    outputs = together.run(mixed)
    for index, (name, expected) in enumerate(plain.items()):
        assert outputs[index * len(expected) : (index + 1) * len(expected)] == expected, name
    if num_pages is not None:
        assert together.stats().num_preemptions > 0, "the pool was not small enough to test preemption"


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_drafts_are_accepted(models: Models, weights: dict[str, str], draft: str) -> None:
    """The equality above would mean little if no draft were ever accepted, or every one."""
    drafted = Engine(models, engine(draft, **weights), FullDraftLength(0))
    drafted.run(requests(GREEDY))
    assert 0.05 < drafted.stats().num_accepted_tokens / drafted.stats().num_draft_tokens < 0.98


def test_a_draft_model_with_a_smaller_embedding(models: Models, weights: dict[str, str]) -> None:
    """Here the padded model is the target: its ids beyond the drafter's 320 rows must neither fail nor change a token."""
    wide = Models(models.draft, models.target)
    prompts_beyond = [replace(request, prompt_token_ids=(340, *request.prompt_token_ids, 351)) for request in requests(GREEDY)]
    expected = Engine(wide, engine("none", **weights)).run(prompts_beyond)
    assert Engine(wide, engine("draft_model", **weights)).run(prompts_beyond) == expected


@pytest.mark.parametrize("architecture", ["llama3", "qwen2", "qwen3"])
def test_every_architecture(tmp_path: Path, weights: dict[str, str], architecture: str) -> None:
    """A second time too, when the prompts come from the prefix cache."""
    target = make_tiny_model(tmp_path / architecture, architecture)
    each = Models(target, target)
    alone = Engine(each, engine("none", **weights))
    expected = [alone.run([request])[0] for request in requests(SAMPLINGS["t0.7-top_p"])]
    for draft in DRAFTERS:
        drafted = Engine(each, engine(draft, **weights, max_num_batched_tokens=20))
        assert drafted.run(requests(SAMPLINGS["t0.7-top_p"])) == expected
        assert drafted.run(requests(SAMPLINGS["t0.7-top_p"])) == expected
        assert drafted.stats().num_prefix_hit_tokens == 18 * PAGE_SIZE, "every full page but for the last token's"


def test_weights_of_8_bits(models: Models) -> None:
    eight = {"dtype": "auto", "quantization": "int8"}
    alone = Engine(models, engine("none", **eight, enable_prefix_caching=False))
    expected = [alone.run([request])[0] for request in requests(SAMPLINGS["t1.0-top_k-min_p"])]
    together = Engine(models, engine("draft_model", **eight, max_batch_size=3, max_num_batched_tokens=13), RandomDraftLength(1))
    assert together.run(requests(SAMPLINGS["t1.0-top_k-min_p"])) == expected


def test_any_number_of_threads(models: Models, weights: dict[str, str], plain: dict[str, list[tuple[int, ...]]]) -> None:
    """Each thread takes what is left to do, so the same work falls to another thread in each pass; float32 is torch's promise."""
    for threads in (2, 3):
        shared = Engine(models, engine("ngram", **weights, threads=threads), FullDraftLength(0))
        assert shared.run(requests(SAMPLINGS["t0.7-top_p"])) == plain["t0.7-top_p"], threads
    torch.set_num_threads(1)


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_half_precision_differs_at_near_ties_only(models: Models, draft: str) -> None:
    """Where products round by shape a draft may change a token, but only one whose rival was as likely to a thousandth."""
    asked = requests(replace(GREEDY, num_logprobs=2))
    alone = Engine(models, engine("none", dtype="bfloat16"))
    drafted = Engine(models, engine(draft, dtype="bfloat16"), FullDraftLength(0)).run(asked)
    for request, tokens in zip(asked, drafted, strict=True):
        check_near_ties(alone.deltas([request])[0], tokens)


def check_near_ties(plain_deltas: list[TokenDelta], tokens: tuple[int, ...]) -> None:
    """`tokens` may leave the plain answer only where its two likeliest tokens are within NEAR_TIE."""
    plain_tokens = [token for delta in plain_deltas for token in delta.token_ids]
    logprobs = [entry for delta in plain_deltas for entry in delta.logprobs]
    assert len(plain_tokens) == len(tokens)
    for expected, token, entry in zip(plain_tokens, tokens, logprobs, strict=True):
        if token != expected:
            assert entry.top_logprobs[0] - entry.top_logprobs[1] < NEAR_TIE
            return


def test_a_planted_fault_is_noticed(
    models: Models, weights: dict[str, str], plain: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that run one position too early read and write the wrong keys: the comparison must fail."""
    honest = step._row_input

    def shifted(run: Any) -> RowInput:
        row = honest(run)
        return replace(row, start=max(row.start - 1, 0)) if row.num_logits > 1 else row

    asked = requests(replace(GREEDY, num_logprobs=2))
    honest_deltas = Engine(models, engine("none", **weights)).deltas(asked)
    monkeypatch.setattr(step, "_row_input", shifted)
    shifted_tokens = Engine(models, engine("ngram", **weights), FullDraftLength(0)).run(asked)
    assert shifted_tokens != plain["greedy"]
    with pytest.raises(AssertionError):
        [check_near_ties(deltas, tokens) for deltas, tokens in zip(honest_deltas, shifted_tokens, strict=True)]
