"""The first promise for every sampling option: penalties, bias, bans and least lengths position by position, and cuts.

What plain decoding gives is checked against a slow sampler of its own; what speculation gives, against plain decoding.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.executor import step
from paceline.speculative.drafter import DRAFTERS
from paceline.speculative.drafters import draft_model
from tests.fakes import option_faults
from tests.fakes.slow_sampler import adjusted, slow_choice
from tests.fakes.token_engine import Engine, FullDraftLength, Models, RandomDraftLength, engine, make_models, requests

NUM_OUTPUT_TOKENS = 26
GREEDY = SamplingParams(NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.8, seed=11)
STOPS = tuple(range(40, 200, 3))
OPTIONS = {
    "frequency": replace(GREEDY, frequency_penalty=0.6),
    "presence": replace(WARM, presence_penalty=-0.9),
    "repetition": replace(GREEDY, repetition_penalty=1.3),
    "all-penalties": replace(WARM, presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=0.8, top_p=0.95),
    "bias": replace(WARM, logit_bias=tuple((token, (token % 7) - 3.0) for token in range(0, 320, 5)), top_k=30),
    "bans": replace(GREEDY, banned_sequences=tuple((token,) for token in range(3, 300, 4))),
    "min_tokens": replace(WARM, stop_token_ids=STOPS, min_tokens=17),
    "top_k": replace(WARM, temperature=1.2, top_k=7),
    "top_p": replace(WARM, temperature=1.2, top_p=0.6),
    "min_p": replace(WARM, temperature=1.2, min_p=0.2),
    "everything": replace(
        WARM,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias=((7, 5.0), (9, -100.0)),
        stop_token_ids=STOPS,
        min_tokens=9,
        min_p=0.01,
    ),
}

Outputs = dict[str, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def options(models: Models) -> dict[str, SamplingParams]:
    """With bans of pairs that the model likes: those it writes when nothing is banned."""
    free = Engine(models, engine("none")).run(requests(GREEDY))
    pairs = tuple({(a, b) for tokens in free for a, b in zip(tokens[4::5], tokens[5::5], strict=False)})
    return {**OPTIONS, "banned-pairs": replace(GREEDY, banned_sequences=pairs[:40])}


@pytest.fixture(scope="module")
def plain(models: Models, options: dict[str, SamplingParams]) -> Outputs:
    """Every request alone, without a drafter: the reference."""
    alone = Engine(models, engine("none", enable_prefix_caching=False))
    return {name: [alone.run([request])[0] for request in requests(sampling)] for name, sampling in options.items()}


def test_options_do_something(models: Models, plain: Outputs) -> None:
    alone = Engine(models, engine("none"))
    greedy, warm = (alone.run(requests(sampling)) for sampling in (GREEDY, WARM))
    for name, outputs in plain.items():
        assert outputs not in (greedy, warm), name
    assert all(len(tokens) >= 17 for tokens in plain["min_tokens"])
    assert any(len(tokens) < NUM_OUTPUT_TOKENS for tokens in plain["min_tokens"])


@pytest.mark.parametrize("draft", [name for name in DRAFTERS if name != "none"])
def test_drafts_as_long_as_can_be(models: Models, options: dict[str, SamplingParams], plain: Outputs, draft: str) -> None:
    full = Engine(models, engine(draft, max_batch_size=3), FullDraftLength(0))
    for name, sampling in options.items():
        assert full.run(requests(sampling)) == plain[name], name


@pytest.mark.parametrize("draft", DRAFTERS)
def test_batches_chunks_and_preemption(models: Models, options: dict[str, SamplingParams], plain: Outputs, draft: str) -> None:
    """All options in one batch at random draft lengths; counts are rebuilt after preemption."""
    facts = Engine(models, engine(draft)).facts
    memory = 30 * (facts.target_page_bytes + facts.drafter_page_bytes)
    config = engine(draft, max_batch_size=9, max_model_len=104, kv_cache_memory_bytes=memory, max_num_batched_tokens=40)
    together = Engine(models, config, RandomDraftLength(len(draft)))
    mixed = [
        replace(request, request_id=f"{name}-{request.request_id}") for name, sampling in options.items() for request in requests(sampling)
    ]
    random.Random(3).shuffle(mixed)
    expected = {f"{name}-r{index}": tokens for name, outputs in plain.items() for index, tokens in enumerate(outputs)}
    outputs = dict(zip((request.request_id for request in mixed), together.run(mixed), strict=True))
    assert outputs == expected
    assert together.stats().num_preemptions > 0, "the pool was not small enough to test preemption"


def test_batches_on_quantised_weights(models: Models, options: dict[str, SamplingParams]) -> None:
    """The same, drafted by the draft model on the native step; its results lie in memory that the next pass writes to."""
    native = {"dtype": "auto", "quantization": "int4"}
    alone = Engine(models, engine("none", **native))
    mixed = [
        replace(request, request_id=f"{name}-{request.request_id}") for name, sampling in options.items() for request in requests(sampling)
    ]
    expected = [alone.run([request])[0] for request in mixed]
    memory = 30 * sum(_page_bytes(models, native))
    config = engine("draft_model", **native, max_batch_size=9, max_model_len=104, kv_cache_memory_bytes=memory, max_num_batched_tokens=40)
    together = Engine(models, config, RandomDraftLength(5))
    assert together.run(mixed) == expected
    assert together.stats().num_preemptions > 0


def _page_bytes(models: Models, weights: dict[str, str]) -> tuple[int, int]:
    facts = Engine(models, engine("draft_model", **weights)).facts
    return facts.target_page_bytes, facts.drafter_page_bytes


def test_plain_decoding_against_a_slow_sampler(models: Models, options: dict[str, SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the raw logits that the engine saw."""
    seen: list[torch.Tensor] = []
    honest = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, rows: seen.append(logits[-1].clone()) or honest(logits, rows))
    alone = Engine(models, engine("none", enable_prefix_caching=False))
    for name, sampling in options.items():
        request = requests(sampling)[3]
        seen.clear()
        (tokens,) = alone.run([request])
        assert len(seen) == len(tokens), "one pass of the whole prompt, then one a token"
        for index, raw in enumerate(seen):
            output = tokens[:index]
            allowed = adjusted(raw.tolist(), request.prompt_token_ids, output, sampling, sampling.stop_token_ids)
            assert tokens[index] == slow_choice(allowed, output, request.sampling), f"{name}, token {index}"


@pytest.mark.parametrize(
    ("fault", "option"),
    [
        (option_faults.count_rejected, "frequency"),
        (option_faults.one_count_for_all_positions, "all-penalties"),
        (option_faults.drafts_not_in_bans, "banned-pairs"),
        (option_faults.drafts_not_in_bans, "min_tokens"),
        (option_faults.counts_forget_output, "repetition"),
        (option_faults.bonus_without_options, "bias"),
    ],
)
def test_planted_faults_are_noticed(
    models: Models,
    options: dict[str, SamplingParams],
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    option: str,
) -> None:
    fault(monkeypatch)
    full = Engine(models, engine("draft_model"), FullDraftLength(0))
    assert full.run(requests(options[option])) != plain[option]


def test_drafts_under_options_are_accepted_as_often(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that knew nothing of the bans would propose what they ban."""
    sampling = OPTIONS["bans"]

    def accepted_share() -> float:
        full = Engine(models, engine("draft_model"), FullDraftLength(0))
        full.run(requests(sampling))
        return full.stats().num_accepted_tokens / full.stats().num_draft_tokens

    aware = accepted_share()
    monkeypatch.setattr(draft_model, "adjust", lambda logits, rows: logits)
    assert aware > accepted_share() + 0.05
