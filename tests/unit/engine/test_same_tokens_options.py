"""The first promise for the options that change logits, position by position: penalties, bias, bans, least lengths.

What plain decoding gives is checked against a slow sampler of its own; what speculation gives, against plain decoding.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.core.slot import Slot
from paceline.executor import step
from paceline.executor.slots import SlotTable
from paceline.speculative import adjust
from paceline.speculative.drafters import draft_model
from paceline.speculative.noise import gumbel
from tests.fakes.token_engine import MAX_DRAFT_LENGTH, Engine, FullDraftLength, Models, RandomDraftLength, engine, make_models, requests

NUM_OUTPUT_TOKENS = 32
DRAFTERS = ("none", "ngram", "draft_model")
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


@pytest.mark.parametrize("draft", DRAFTERS)
def test_any_drafter_and_draft_length(models: Models, options: dict[str, SamplingParams], plain: Outputs, draft: str) -> None:
    full = Engine(models, engine(draft, max_batch_size=1), FullDraftLength(0))
    for name, sampling in options.items():
        for max_draft_length in (2, MAX_DRAFT_LENGTH):
            assert full.run(requests(sampling, max_draft_length)) == plain[name], f"{name}, K={max_draft_length}"


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


def slow_choice(raw: list[float], request: Request, output: list[int], stops: Sequence[int]) -> int:
    """The next token by the rules as they are written down, one token after the other, in Python's own floats."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    best, best_score = -1, -float("inf")
    for token, value in enumerate(raw):
        score = value
        if token in prompt or token in output:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        score -= sampling.frequency_penalty * output.count(token)
        score -= sampling.presence_penalty * (token in output)
        score += dict(sampling.logit_bias).get(token, 0.0)
        if token in stops and len(output) < sampling.min_tokens:
            continue
        if any(tuple([*output, token][-len(banned) :]) == banned for banned in sampling.banned_sequences):
            continue
        if sampling.temperature > 0:
            assert sampling.seed is not None
            score /= sampling.temperature
            score += float(gumbel(torch.tensor([sampling.seed]), torch.tensor([len(output)]), torch.tensor([token])))
        if score > best_score:
            best, best_score = token, score
    return best


def test_plain_decoding_against_a_slow_sampler(models: Models, options: dict[str, SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the raw logits that the engine saw. Without cuts, which have tests of their own."""
    seen: list[torch.Tensor] = []
    honest = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, rows: seen.append(logits[-1].clone()) or honest(logits, rows))
    alone = Engine(models, engine("none", enable_prefix_caching=False))
    for name, sampling in options.items():
        request = requests(replace(sampling, top_k=0, top_p=1.0, min_p=0.0))[3]
        seen.clear()
        (tokens,) = alone.run([request])
        assert len(seen) == len(tokens), "one pass of the whole prompt, then one a token"
        for index, raw in enumerate(seen):
            expected = slow_choice(raw.tolist(), request, list(tokens[:index]), sampling.stop_token_ids)
            assert tokens[index] == expected, f"{name}, token {index}"


def count_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties that count drafts whether or not they were accepted."""
    honest = SlotTable.commit

    def commit(self: SlotTable, plan: object, verification: object) -> list[tuple[int, ...]]:
        new_tokens = honest(self, plan, verification)  # type: ignore[arg-type]
        for slot in self.slots.values():
            if slot.counts is not None:
                slot.counts.output[slot.token_ids[-1] ^ 1] += 1
        return new_tokens

    monkeypatch.setattr(SlotTable, "commit", commit)


def one_count_for_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft position sees the committed counts alone."""
    honest = adjust._penalise
    monkeypatch.setattr(adjust, "_penalise", lambda logits, counts, rows: honest(logits, counts, replace(rows, drafts=[], first=0)))


def drafts_not_in_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = adjust._banned
    monkeypatch.setattr(adjust, "_banned", lambda slot, drafts: honest(slot, []))


def counts_forget_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "append", lambda self, token_ids: self.token_ids.extend(token_ids))


def bonus_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position behind the last draft goes unadjusted."""
    honest = step.AdjustedRows
    monkeypatch.setattr(step, "AdjustedRows", lambda start, num, slot, drafts: honest(start, num - (1 if drafts else 0), slot, drafts))


@pytest.mark.parametrize(
    "mutation", [count_rejected, one_count_for_all_positions, drafts_not_in_bans, counts_forget_output, bonus_without_options]
)
def test_planted_faults_are_noticed(
    models: Models, options: dict[str, SamplingParams], plain: Outputs, monkeypatch: pytest.MonkeyPatch, mutation: Callable[..., None]
) -> None:
    mutation(monkeypatch)
    full = Engine(models, engine("draft_model"), FullDraftLength(0))
    assert any(full.run(requests(sampling)) != plain[name] for name, sampling in options.items())


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
